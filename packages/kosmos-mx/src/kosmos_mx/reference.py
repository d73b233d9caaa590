"""MXFP8 by its definition, in FP64 and plain PyTorch: oracle of every test, and the error bound."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kosmos_mx.formats import (
    GROUP,
    NAN_CODE,
    SCALE_BIAS,
    SCALE_DTYPE,
    Format,
    num_groups,
    padded,
)

NAN_ELEMENT = 0x7F


def pad_segments(x: torch.Tensor, segments: Sequence[int]) -> torch.Tensor:
    """[rows, cols] with each segment of columns padded with zeros to whole groups."""
    parts = []
    for part in torch.split(x, list(segments), dim=1):
        parts.append(part)
        parts.append(x.new_zeros(x.shape[0], padded(part.shape[1]) - part.shape[1]))
    return torch.cat(parts, dim=1) if parts else x


def crop_segments(x: torch.Tensor, segments: Sequence[int]) -> torch.Tensor:
    """Undoes `pad_segments`."""
    parts = torch.split(x, [padded(length) for length in segments], dim=1)
    kept = [part[:, :length] for part, length in zip(parts, segments, strict=True)]
    return torch.cat(kept, dim=1) if kept else x


def scale_codes(amax: torch.Tensor, form: Format, scaling: str) -> torch.Tensor:
    """E8M0 codes, int64, of groups with these largest magnitudes (float64, of fp32 values).

    "rceil": the least power of two not below amax / largest, the quotient rounded to FP32;
    "floor": 2^floor(log2(amax)) over the power of two of the largest element.
    """
    if scaling == "rceil":
        # Divided in FP32, which is what the recipe says; everything else here is exact.
        quotient = (amax.float() / form.largest).double()
        mantissa, exponent = torch.frexp(quotient)
        power = exponent - (mantissa == 0.5).long()
        code = torch.where(quotient == 0, 0, (power + SCALE_BIAS).clamp(min=0))
        code = torch.where(torch.isinf(amax), 254, code)
    else:
        power = torch.frexp(amax).exponent - 1 - form.top
        code = torch.where(amax == 0, 0, (power + SCALE_BIAS).clamp(min=0))
        # Infinity has the exponent after that of the largest finite numbers.
        code = torch.where(torch.isinf(amax), 128 - form.top + SCALE_BIAS, code)
    return torch.where(torch.isnan(amax), NAN_CODE, code)


def element_factors(code: torch.Tensor, scaling: str) -> torch.Tensor:
    """What elements are multiplied by before they are rounded, float64; see docs/numerics.md."""
    factor = torch.exp2((SCALE_BIAS - code).double())
    if scaling == "rceil":
        factor = torch.where(code == 0, 1.0, factor)
        return torch.where(code == NAN_CODE, torch.nan, factor)
    factor = torch.where(code == 0, 2.0**126, factor)
    return torch.where(code == NAN_CODE, 0.0, factor)


def round_elements(y: torch.Tensor, form: Format) -> torch.Tensor:
    """float64 to elements: nearest, ties to even, saturating; NaN to 0x7F."""
    kept = y.clamp(-form.largest, form.largest)
    exponent = torch.frexp(kept.abs()).exponent - 1
    unit = torch.exp2((exponent.clamp(min=1 - form.bias) - form.mantissa_bits).double())
    bits = (torch.round(kept / unit) * unit).to(form.dtype).view(torch.uint8)
    return torch.where(torch.isnan(y), NAN_ELEMENT, bits).to(torch.uint8).view(form.dtype)


def quantize_rows(
    x: torch.Tensor, form: Format, scaling: str, segments: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups along rows.

    Args:
        x: [rows, cols] bfloat16 or float32.
        form: of the elements.
        scaling: "rceil" or "floor".
        segments: lengths into which the columns fall; each is padded to whole groups.

    Returns:
        elements [rows, padded cols] and scales [rows, padded cols / 32].
    """
    full = pad_segments(x.double(), segments)
    groups = full.reshape(x.shape[0], full.shape[1] // GROUP, GROUP)
    code = scale_codes(groups.abs().amax(-1), form, scaling)
    elements = round_elements(groups * element_factors(code, scaling)[..., None], form)
    scales = code.to(torch.uint8).view(SCALE_DTYPE)
    return elements.reshape(full.shape), scales


def dequantize_rows(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [rows, padded cols], exact; NaN where the scale is. Inverse of `quantize_rows`."""
    code = scales.view(torch.uint8).long()
    factor = torch.where(code == NAN_CODE, torch.nan, torch.exp2((code - SCALE_BIAS).double()))
    groups = data.double().reshape(data.shape[0], scales.shape[1], GROUP)
    return (groups * factor[..., None]).reshape(data.shape)


def error_bound(x: torch.Tensor, form: Format, scaling: str) -> torch.Tensor:
    """Most by which an element of `quantize_rows`, dequantised, may be off, float64.

    Args:
        x: [rows, cols] finite bfloat16 or float32.
        form: of the elements.
        scaling: "rceil" or "floor".

    An element is scaled exactly, so that it is off by at most half a unit: that of the format's
    numbers of its size, or that of the smallest ones at the group's scale. Under "floor" what
    passes the largest element is cut off. In groups with code 0 "rceil" gives zeros and "floor"
    half of the value.
    """
    full = pad_segments(x.double(), [x.shape[1]])
    groups = full.reshape(x.shape[0], num_groups(x.shape[1]), GROUP).abs()
    code = scale_codes(groups.amax(-1), form, scaling)[..., None]
    scale = torch.exp2((code - SCALE_BIAS).double())
    half_unit = torch.exp2((torch.frexp(groups).exponent - 2 - form.mantissa_bits).double())
    half_unit = torch.maximum(half_unit, scale * (form.smallest / 2))
    cut = (groups - scale * form.largest).clamp(min=0)
    bound = torch.where(code == 0, groups + scale * form.smallest, half_unit + cut)
    return bound.reshape(full.shape)[:, : x.shape[1]]
