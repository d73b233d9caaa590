"""A matrix in MXFP8: elements, the scales of their groups, and which way the groups lie."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from kosmos_core.errors import ArgumentError

from kosmos_mx.formats import FORMATS, SCALE_DTYPE, Format, format_of, num_groups, padded
from kosmos_mx.reference import crop_segments, dequantize_rows

AXES = ("row", "col")
# A matrix of at most so many elements is printed with its values, as torch does.
PRINTED_ELEMENTS = 1000


@dataclass(frozen=True, eq=False, repr=False)
class MXTensor:
    """A matrix [rows, cols] of which 32 elements along `axis` share a scale.

    Attributes:
        data: [rows, cols] float8_e4m3fn or float8_e5m2, padded with zeros along the groups:
            every segment fills whole groups.
        scales: float8_e8m0fnu, [rows, padded cols / 32] for "row", [padded rows / 32, cols] for
            "col".
        axis: "row" if groups lie along rows (contraction over the columns), "col" if along columns.
        shape: [rows, cols] without the padding.
        segments: lengths along the groups of what must not share one: the rows that each rank
            or expert holds. One segment is the whole length.

    Raises:
        ArgumentError: the parts do not fit together.
    """

    data: torch.Tensor
    scales: torch.Tensor
    axis: str
    shape: tuple[int, int]
    segments: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.axis not in AXES:
            raise ArgumentError(f"axis: got {self.axis!r}, wanted one of {', '.join(AXES)}")
        along = 1 if self.axis == "row" else 0
        format_of(self.data.dtype)
        if self.scales.dtype is not SCALE_DTYPE:
            raise ArgumentError(f"scales: got {self.scales.dtype}, wanted {SCALE_DTYPE}")
        if len(self.shape) != 2 or min(self.shape) < 0 or min(self.segments, default=0) < 0:
            raise ArgumentError(
                f"shape: got {self.shape} in segments {self.segments}, wanted two sizes, none "
                "negative"
            )
        if sum(self.segments) != self.shape[along]:
            raise ArgumentError(
                f"segments: got {self.segments}, wanted lengths that add up to {self.shape[along]}"
            )
        for name, tensor, length in (
            ("data", self.data, sum(map(padded, self.segments))),
            ("scales", self.scales, sum(map(num_groups, self.segments))),
        ):
            wanted = list(self.shape)
            wanted[along] = length
            if list(tensor.shape) != wanted:
                raise ArgumentError(f"{name}: got shape {list(tensor.shape)}, wanted {wanted}")
            if not (tensor.is_contiguous() or tensor.t().is_contiguous()):
                raise ArgumentError(
                    f"{name}: got strides {tensor.stride()}, wanted a contiguous matrix or the "
                    "transpose of one; call contiguous() on it"
                )
        if self.data.is_contiguous() != self.scales.is_contiguous() and not (
            self.data.t().is_contiguous() and self.scales.t().is_contiguous()
        ):
            raise ArgumentError("scales: got another memory order than data, wanted the same")
        if self.scales.device != self.data.device:
            raise ArgumentError(
                f"scales: got one on {self.scales.device}, wanted {self.data.device} as data"
            )

    @property
    def format(self) -> Format:
        """Format of the elements."""
        return format_of(self.data.dtype)

    @property
    def device(self) -> torch.device:
        """Where the parts are."""
        return self.data.device

    @property
    def is_transposed(self) -> bool:
        """Whether columns, not rows, lie together in memory."""
        return not (self.data.is_contiguous() and self.scales.is_contiguous())

    @property
    def is_k_major(self) -> bool:
        """Whether the elements of a group lie together in memory."""
        return (self.axis == "row") != self.is_transposed

    @property
    def num_bytes(self) -> int:
        """Bytes of elements and scales."""
        return self.data.numel() + self.scales.numel()

    def t(self) -> MXTensor:
        """The transpose; it shares the memory, and its groups lie the other way."""
        return replace(
            self,
            data=self.data.t(),
            scales=self.scales.t(),
            axis="col" if self.axis == "row" else "row",
            shape=(self.shape[1], self.shape[0]),
        )

    @property
    def T(self) -> MXTensor:
        """As `t()`."""
        return self.t()

    def to(self, device: torch.device | str) -> MXTensor:
        """The same on another device."""
        return replace(self, data=self.data.to(device), scales=self.scales.to(device))

    def equal(self, other: MXTensor) -> bool:
        """Whether everything is the same, bit by bit; equal NaN are equal."""
        if (self.axis, self.shape, self.segments) != (other.axis, other.shape, other.segments):
            return False
        pairs = ((self.data, other.data), (self.scales, other.scales))
        return self.data.dtype is other.data.dtype and all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs
        )

    def dequantize(
        self, dtype: torch.dtype = torch.bfloat16, *, padding: bool = False
    ) -> torch.Tensor:
        """[rows, cols] as `dtype`: float32 and float64 exact, bfloat16 rounded to nearest.

        BF16 holds E4M3 elements exactly with scale codes 3 to 246. A new tensor, of the memory
        order of `data`.

        Args:
            dtype: bfloat16, float32 or float64.
            padding: keep the padding to whole groups.

        Raises:
            ArgumentError: another dtype.
        """
        from kosmos_mx.ops.dequantize import dequantize

        return dequantize(self, dtype, padding=padding)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes it with `torch.save`; `load` reads it, and so does a plain `torch.load`."""
        torch.save(self, file)

    @staticmethod
    def load(file: str | os.PathLike[str], device: torch.device | str | None = None) -> MXTensor:
        """Reads what `save` has written, running no code from the file.

        Raises:
            ArgumentError: something else was saved in it.
        """
        loaded: Any = torch.load(file, map_location=device, weights_only=True)
        if not isinstance(loaded, MXTensor):
            raise ArgumentError(f"file: got a {type(loaded).__name__}, wanted a saved MXTensor")
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        """The parts as bytes: plain pickle knows no storage of scales' type."""
        parts = {"data": self.data.view(torch.uint8), "scales": self.scales.view(torch.uint8)}
        return {**self.__dict__, **parts, "format": self.format.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = dict(state)
        form = FORMATS[kept.pop("format")]
        kept["data"] = kept["data"].view(form.dtype)
        kept["scales"] = kept["scales"].view(SCALE_DTYPE)
        self.__dict__.update(kept)

    def __repr__(self) -> str:
        values = "..."
        if self.shape[0] * self.shape[1] <= PRINTED_ELEMENTS:
            values = str(self._values()).removeprefix("tensor(").removesuffix(")")
            values = values.replace("\n" + " " * 7, "\n" + " " * 9)
        segments = f", segments={self.segments}" if len(self.segments) != 1 else ""
        turned = ", transposed" if self.is_transposed else ""
        return (
            f"MXTensor({values}, shape={self.shape}, axis={self.axis!r}, "
            f"format={self.format.name}{segments}{turned}, device='{self.device}')"
        )

    def _values(self) -> torch.Tensor:
        # By the reference, so that printing launches nothing.
        upright = self if self.axis == "row" else self.t()
        data, scales = upright.data.cpu().contiguous(), upright.scales.cpu().contiguous()
        values = crop_segments(dequantize_rows(data, scales).float(), upright.segments)
        return values if self.axis == "row" else values.t()


torch.serialization.add_safe_globals([MXTensor])
