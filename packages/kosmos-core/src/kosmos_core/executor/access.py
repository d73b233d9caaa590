"""Accesses: pointer arrays resolved to one strided block or a list of offsets in one region."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .region import Region

Array = np.ndarray[Any, Any]

UINT: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}


class Access:
    """Elements of one region that one instruction touches.

    Attributes:
        region: the region.
        itemsize: bytes an element.
        shape: shape of the block.
        offset: byte offset of element 0 of a strided block.
        strides: byte strides of a strided block, all >= 0; None for a list of offsets.
        index: byte offsets (1-D) if the elements form no block, else None.
        select: where the elements stand in the instruction's operand: None (all of it), a tuple
            of slices, or a boolean mask.
        lo, hi: byte range in the region, half open.
        nbytes: bytes touched.
    """

    __slots__ = (
        "hi", "index", "itemsize", "lo", "nbytes", "offset", "region", "select", "shape", "strides",
    )  # fmt: skip

    def __init__(
        self,
        region: Region,
        itemsize: int,
        shape: tuple[int, ...],
        offset: int,
        strides: tuple[int, ...] | None,
        index: Array | None,
        select: Any,
        lo: int,
        hi: int,
        nbytes: int,
    ) -> None:
        self.region = region
        self.itemsize = itemsize
        self.shape = shape
        self.offset = offset
        self.strides = strides
        self.index = index
        self.select = select
        self.lo = lo
        self.hi = hi
        self.nbytes = nbytes

    @property
    def is_tile(self) -> bool:
        """Whether more than one element is touched (all threads take part, not one)."""
        return self.nbytes > self.itemsize

    def gather(self, buffer: Array, dtype: np.dtype[Any], shift: int = 0) -> Array:
        """Copy of the elements, from bytes that start at byte `shift` of the region."""
        if self.index is None:
            start = self.offset - shift
            block: Array = np.ndarray(self.shape, dtype, buffer, start, self.strides)
            return np.array(block)
        usable = len(buffer) // self.itemsize * self.itemsize
        out: Array = buffer[:usable].view(dtype)[(self.index - shift) // self.itemsize]
        return out

    def scatter(self, buffer: Array, dtype: np.dtype[Any], values: Any, shift: int = 0) -> None:
        """Write values (block shaped, or 1-D for a list) into `buffer`.

        The buffer starts at byte `shift` of the region.
        """
        if self.index is None:
            view: Array = np.ndarray(self.shape, dtype, buffer, self.offset - shift, self.strides)
            view[...] = values
        else:
            usable = len(buffer) // self.itemsize * self.itemsize
            buffer[:usable].view(dtype)[(self.index - shift) // self.itemsize] = values

    def pick(self, values: Array) -> Array:
        """The part of an instruction's operand that belongs to this access."""
        if self.select is not None:
            out: Array = values[self.select]
            return out
        return values if self.index is None else values.ravel()

    def offsets(self) -> Array:
        """Byte offsets of all elements, 1-D, in the order of `gather`."""
        if self.index is not None:
            return self.index
        assert self.strides is not None
        out = np.full(self.shape, self.offset, np.int64)
        for d, (n, s) in enumerate(zip(self.shape, self.strides, strict=True)):
            line = np.arange(n, dtype=np.int64) * s
            out += line.reshape((1,) * d + (n,) + (1,) * (len(self.shape) - d - 1))
        return out.ravel()

    def shadow(self, array: Array, grain: int) -> Array:
        """The entries of a shadow array (one entry per `grain` bytes): view if strided, else copy.

        The shape is that of `gather`, with one more axis when an element spans several grains.
        """
        k = self.itemsize // grain
        size = array.itemsize
        if self.index is None:
            assert self.strides is not None
            strides = tuple([s // grain * size for s in self.strides])
            start = self.offset // grain * size
            shape = self.shape
            if k > 1:
                shape, strides = (*shape, k), (*strides, size)
            block: Array = np.ndarray(shape, array.dtype, array, start, strides)
            return block
        out: Array = array[self.shadow_index(grain)]
        return out

    def set_shadow(self, array: Array, grain: int, value: int) -> None:
        """Set the entries of a shadow array."""
        if self.index is None:
            self.shadow(array, grain)[...] = value
        else:
            array[self.shadow_index(grain)] = value

    def shadow_index(self, grain: int) -> Array:
        """Entries of a shadow array, 1-D (only for lists of offsets)."""
        assert self.index is not None
        first = self.index // grain
        k = self.itemsize // grain
        return first if k <= 1 else (first[:, None] + np.arange(k)).ravel()

    def element(self, position: tuple[int, ...], grain: int) -> int:
        """Byte offset of the element at `position` of the shape of `shadow`."""
        if self.index is not None:
            return int(self.index[int(position[0]) // max(1, self.itemsize // grain)])
        assert self.strides is not None
        steps = zip(position, self.strides, strict=False)
        return self.offset + sum(int(x) * s for x, s in steps)

    def overlaps(self, other: Access) -> bool:
        """Whether the two accesses of one region share a byte (exact)."""
        lo, hi = max(self.lo, other.lo), min(self.hi, other.hi)
        if lo >= hi:
            return False
        if self.nbytes == self.hi - self.lo and other.nbytes == other.hi - other.lo:
            return True
        mine = self.byte_mask()[lo - self.lo : hi - self.lo]
        return bool((mine & other.byte_mask()[lo - other.lo : hi - other.lo]).any())

    def byte_mask(self) -> Array:
        """Boolean per byte of ``[lo, hi)``."""
        mask = np.zeros(self.hi - self.lo, np.bool_)
        first = self.offsets() - self.lo
        for b in range(self.itemsize):
            mask[first + b] = True
        return mask


_offsets_cache: dict[tuple[tuple[int, ...], tuple[int, ...]], Array] = {}


def affine_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Offsets of a block from its first element (cached, read only)."""
    key = (shape, strides)
    out = _offsets_cache.get(key)
    if out is None:
        if len(_offsets_cache) > 512:
            _offsets_cache.clear()
        out = np.zeros(shape, np.int64)
        for d, (n, s) in enumerate(zip(shape, strides, strict=True)):
            line = np.arange(n, dtype=np.int64) * s
            out += line.reshape((1,) * d + (n,) + (1,) * (len(shape) - d - 1))
        _offsets_cache[key] = out
    return out


def affine_strides(p: Array, itemsize: int) -> tuple[int, ...] | None:
    """Byte strides if the int64 address array `p` is an affine block with strides >= 0."""
    first = p[(0,) * p.ndim]
    strides = []
    for d, n in enumerate(p.shape):
        if n == 1:
            strides.append(itemsize)
            continue
        second = [0] * p.ndim
        second[d] = 1
        s = int(p[tuple(second)] - first)
        if s < 0 or s % itemsize:
            return None
        strides.append(s)
    out = tuple(strides)
    return out if np.array_equal(p - first, affine_offsets(p.shape, out)) else None


def prefix_rectangle(mask: Array) -> tuple[slice, ...] | None:
    """Slices if the true elements of `mask` form a rectangle, else None."""
    slices = []
    count = 1
    for d in range(mask.ndim):
        axes = tuple(i for i in range(mask.ndim) if i != d)
        line = np.flatnonzero(mask.any(axis=axes) if axes else mask)
        lo, hi = int(line[0]), int(line[-1]) + 1
        slices.append(slice(lo, hi))
        count *= hi - lo
    return tuple(slices) if int(np.count_nonzero(mask)) == count else None
