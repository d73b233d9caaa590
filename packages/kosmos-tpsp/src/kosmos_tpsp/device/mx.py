"""Device functions of kosmos-mx, which is an extra: nothing compiles for MXFP8 without it."""

try:
    from kosmos_mx.device.encode import E4M3, GROUP
    from kosmos_mx.device.gemm import scaled_tile
    from kosmos_mx.device.mover import load_column_groups, move_groups, unpack_columns
except ImportError:
    E4M3 = GROUP = load_column_groups = move_groups = None  # type: ignore[assignment]
    scaled_tile = unpack_columns = None  # type: ignore[assignment]

__all__ = ["E4M3", "GROUP", "load_column_groups", "move_groups", "scaled_tile", "unpack_columns"]
