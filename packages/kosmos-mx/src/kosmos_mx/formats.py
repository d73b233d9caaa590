"""The numbers of MXFP8: element formats, E8M0 scales, groups."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kosmos_core.errors import ArgumentError

from kosmos_mx.device import encode

GROUP = 32
"""Elements that share one scale."""

SCALE_DTYPE = torch.float8_e8m0fnu
SCALE_BIAS = 127
"""Code c stands for 2^(c - SCALE_BIAS), c from 0 to 254."""
NAN_CODE = 255

SCALINGS = {"rceil": int(encode.RCEIL.value), "floor": int(encode.FLOOR.value)}


@dataclass(frozen=True)
class Format:
    """An element format.

    Attributes:
        name: "e4m3" or "e5m2".
        dtype: torch's type of it.
        constant: what device functions call it.
        mantissa_bits: explicit ones.
        bias: of the exponent.
        largest: greatest finite magnitude.
        top: exponent of that magnitude.
    """

    name: str
    dtype: torch.dtype
    constant: int
    mantissa_bits: int
    bias: int
    largest: float
    top: int

    @property
    def smallest(self) -> float:
        """Least positive magnitude."""
        return 2.0 ** (1 - self.bias - self.mantissa_bits)

    @property
    def exact_bf16_codes(self) -> range:
        """Scale codes with which BF16 holds every element times the scale exactly.

        BF16 reaches from 2^-133 to below 2^128.
        """
        lowest = self.bias + self.mantissa_bits - 1 - 133 + SCALE_BIAS
        return range(lowest, 127 - self.top + SCALE_BIAS + 1)


E4M3 = Format("e4m3", torch.float8_e4m3fn, int(encode.E4M3.value), 3, 7, 448.0, 8)
E5M2 = Format("e5m2", torch.float8_e5m2, int(encode.E5M2.value), 2, 15, 57344.0, 15)
FORMATS = {form.name: form for form in (E4M3, E5M2)}


def format_of(dtype: torch.dtype) -> Format:
    """The element format that torch calls `dtype`.

    Raises:
        ArgumentError: it is none.
    """
    for form in FORMATS.values():
        if form.dtype is dtype:
            return form
    wanted = " or ".join(str(form.dtype) for form in FORMATS.values())
    raise ArgumentError(f"dtype: got {dtype}, wanted {wanted}")


def num_groups(length: int) -> int:
    """Groups that `length` elements fill, the last one perhaps in part."""
    return -(-length // GROUP)


def padded(length: int) -> int:
    """`length` rounded up to whole groups."""
    return num_groups(length) * GROUP
