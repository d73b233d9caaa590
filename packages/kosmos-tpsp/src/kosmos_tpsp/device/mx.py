"""Device functions of kosmos-mx, which is an extra: nothing compiles for MXFP8 without it."""

try:
    from kosmos_mx.device.encode import E4M3, GROUP
    from kosmos_mx.device.gemm import scaled_tile
    from kosmos_mx.device.mover import move_groups
except ImportError:
    E4M3 = GROUP = move_groups = scaled_tile = None  # type: ignore[assignment]

__all__ = ["E4M3", "GROUP", "move_groups", "scaled_tile"]
