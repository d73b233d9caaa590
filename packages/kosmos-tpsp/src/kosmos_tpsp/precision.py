"""What precision the GEMMs of a parallel linear have."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from kosmos_core.errors import ArgumentError

SCALE_ROUNDINGS = ("rceil", "floor")
COLUMN_DYS = ("gather", "derive")


@dataclass(frozen=True)
class MXFP8:
    """Operands of all GEMMs in MXFP8; see "MXFP8 in the layers" in docs/numerics.md.

    Attributes:
        scale_rounding: "rceil", the MXFP8 training recipe's, or "floor", the OCP specification's.
        column_dy: what a row-parallel layer's weight gradient takes for dY. "gather": the copy
            quantised along the tokens, gathered beside the other one, as in the paper. "derive":
            the copy quantised along the features, which is gathered anyway, dequantised and not
            quantised again; nothing more crosses ranks, and the GEMM runs in BF16.

    Raises:
        ArgumentError: another word.
    """

    scale_rounding: str = "rceil"
    column_dy: str = "gather"

    def __post_init__(self) -> None:
        for name, value, words in (
            ("scale_rounding", self.scale_rounding, SCALE_ROUNDINGS),
            ("column_dy", self.column_dy, COLUMN_DYS),
        ):
            if value not in words:
                raise ArgumentError(f"{name}: got {value!r}, wanted {' or '.join(words)}")


def precision_of(value: str | MXFP8) -> MXFP8 | None:
    """The recipe that `value` names; None for BF16.

    Args:
        value: "bf16", "mxfp8" (`MXFP8()`), or a recipe.

    Raises:
        ArgumentError: it is something else, or MXFP8 is asked for and kosmos-mx not installed.
    """
    if value == "bf16":
        return None
    recipe = MXFP8() if value == "mxfp8" else value
    if not isinstance(recipe, MXFP8):
        raise ArgumentError(f"precision: got {value!r}, wanted 'bf16', 'mxfp8' or an MXFP8")
    if find_spec("kosmos_mx") is None:
        raise ArgumentError(
            f"precision: got {value!r}, wanted kosmos-mx with it; install kosmos-tpsp[mx]"
        )
    return recipe


def with_scales(features: int) -> int:
    """Features of a workspace whose `ag_gemm_pair`s gather copies of so many, and their scales.

    A scale is a byte for every 32 elements, and rows start at multiples of 16 bytes.
    """
    return features + -(-features // 256) * 8


__all__ = ["MXFP8", "precision_of", "with_scales"]
