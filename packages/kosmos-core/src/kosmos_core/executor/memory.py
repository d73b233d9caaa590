"""Simulated memory of all ranks: registered regions and how pointers resolve to them."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import torch

from .access import Access, Array, affine_offsets, affine_strides, prefix_rectangle
from .errors import MemoryFault
from .region import Region

_REDZONE = 256
_ALIGN = 256
# Look for dead tensors once this many have been registered by launches.
_COLLECT_AT = 256


def _use_count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


def first_beyond(offsets: Array, nbytes: int, itemsize: int) -> int:
    """The lowest offset whose element does not end within `nbytes`."""
    return int(offsets[offsets + itemsize > nbytes].min())


class Memory:
    """Registry of regions, ordered by address."""

    def __init__(self) -> None:
        self.bases: list[int] = []
        self.regions: list[Region] = []
        # In order of registration (addresses differ from run to run).
        self.ordered: dict[Region, None] = {}
        self._last: Region | None = None
        self._num_unpinned = 0
        self._collect_at = _COLLECT_AT

    def allocate(
        self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, name: str
    ) -> tuple[torch.Tensor, Region]:
        """New uninitialised tensor with red zones around it, 256-byte aligned."""
        itemsize = dtype.itemsize
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
        raw = torch.empty(nbytes + _ALIGN + 2 * _REDZONE, dtype=torch.uint8, device="cpu")
        start = -(raw.data_ptr() + _REDZONE) % _ALIGN + _REDZONE
        tensor = raw[start : start + nbytes].view(dtype).view(shape)
        region = self.add(raw.data_ptr() + start, max(nbytes, 1), rank, name, itemsize, tensor)
        region.pinned = True
        return tensor, region

    def add(
        self, base: int, nbytes: int, rank: int, name: str, itemsize: int, tensor: torch.Tensor
    ) -> Region:
        """Register an address range."""
        region = Region(base, nbytes, rank, name, itemsize, tensor.detach())
        i = bisect.bisect(self.bases, base)
        self.bases.insert(i, base)
        self.regions.insert(i, region)
        self.ordered[region] = None
        return region

    def clear(self) -> None:
        """Forget everything."""
        self.bases.clear()
        self.regions.clear()
        self.ordered.clear()
        self._last = None

    def register(self, tensor: torch.Tensor, rank: int, name: str) -> tuple[Region | None, bool]:
        """Region of a torch tensor's storage; second value: whether it is new.

        Raises:
            TypeError: the tensor is not on the CPU.
        """
        if tensor.device.type != "cpu":
            raise TypeError(
                f"{name}: the executor runs on CPU tensors, got device {tensor.device}; "
                "move the tensor to the CPU"
            )
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return None, False
        region = self.find(tensor.data_ptr())
        if region is None and tensor.data_ptr() != storage.data_ptr():
            region = self.find(storage.data_ptr())
        if region is not None:
            return region, False
        self._collect()
        size = storage.nbytes()
        return self.add(storage.data_ptr(), size, rank, name, tensor.element_size(), tensor), True

    def release(self, tensor: torch.Tensor) -> None:
        """Its maker is done with a tensor: it is forgotten once nobody else holds it."""
        region = self.find(tensor.data_ptr())
        if region is not None and region.pinned:
            region.pinned = False
            self._collect()

    def _collect(self) -> None:
        """Forget tensors of past launches that nobody else holds, so that long runs do not grow."""
        self._num_unpinned += 1
        if self._num_unpinned <= self._collect_at:
            return
        kept = 0
        for region in list(self.ordered):
            if region.pinned:
                continue
            # Two references are ours: the region's tensor and the storage object made here.
            storage = region.tensor.untyped_storage()
            if region.users or region.watch or _use_count(storage) > 2:
                kept += 1
                continue
            i = bisect.bisect(self.bases, region.base) - 1
            del self.bases[i], self.regions[i], self.ordered[region]
        self._last = None
        self._num_unpinned = kept
        self._collect_at = max(_COLLECT_AT, 2 * kept)

    def find(self, address: int) -> Region | None:
        """The region that holds `address`."""
        r = self._last
        if r is not None and r.base <= address < r.base + r.nbytes:
            return r
        i = bisect.bisect(self.bases, address) - 1
        if i >= 0:
            r = self.regions[i]
            if address < r.base + r.nbytes:
                self._last = r
                return r
        return None

    def describe(self, address: int) -> str:
        """``name[index] (rank r)`` of an address."""
        r = self.find(address)
        return r.where(address - r.base) if r else hex(address)

    def _fault(self, address: int, itemsize: int) -> MemoryFault:
        """Report of an element outside every region."""
        i = bisect.bisect(self.bases, address) - 1
        near, name, index = "no tensor lies below it", "", -1
        if i >= 0:
            r = self.regions[i]
            name, index = r.name, (address - r.base) // r.itemsize
            near = (
                f"nearest below: {r.name} (rank {r.rank}, {r.nbytes // r.itemsize} elements), "
                f"as its element {index}"
            )
        where = f"access of {itemsize} bytes at {address:#x} is outside every registered tensor"
        return MemoryFault(f"{where}; {near}", region=name, index=index)

    def block(
        self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> Access:
        """Access to a block of known strides (>= 0).

        Raises:
            MemoryFault: it leaves its region.
        """
        count = 1
        hi = address + itemsize
        for n, s in zip(shape, strides, strict=True):
            count *= n
            hi += (n - 1) * s
        r = self.find(address)
        if r is None:
            raise self._fault(address, itemsize)
        if hi > r.base + r.nbytes:
            offsets = affine_offsets(shape, strides) + (address - r.base)
            raise self._fault(r.base + first_beyond(offsets, r.nbytes, itemsize), itemsize)
        if address % itemsize:
            raise self._misaligned(r, address, itemsize)
        lo = address - r.base
        if itemsize < r.grain:
            r.refine(itemsize)
        return Access(
            r, itemsize, shape, lo, strides, None, None, lo, hi - r.base, count * itemsize
        )

    def resolve(self, pointers: Array, mask: Array | None, itemsize: int) -> list[Access]:
        """Accesses of an array of addresses (uint64) under an optional boolean mask.

        Normally one; none if everything is masked; several if it spans regions.

        Raises:
            MemoryFault: an unmasked address is outside every region.
        """
        select: Any = None
        if mask is not None:
            if mask.shape != pointers.shape:
                mask = np.broadcast_to(mask, pointers.shape)
            count = int(np.count_nonzero(mask))
            if count == 0:
                return []
            if count == mask.size:
                mask = None
        if pointers.size == 1:
            strides = (itemsize,) * pointers.ndim
            return [self.block(int(pointers.reshape(-1)[0]), pointers.shape, strides, itemsize)]
        p = pointers.view(np.int64)
        if mask is not None:
            select = prefix_rectangle(mask)
        if mask is None or select is not None:
            q = p if select is None else p[select]
            found = affine_strides(q, itemsize)
            if found is not None:
                access = self.block(int(q[(0,) * q.ndim]), q.shape, found, itemsize)
                access.select = select
                return [access]
        flat = (p if mask is None else p[mask]).ravel()
        lo, hi = int(flat.min()), int(flat.max()) + itemsize
        r = self.find(lo)
        if r is None:
            raise self._fault(lo, itemsize)
        if hi <= r.base + r.nbytes:
            return [self._list(r, flat - r.base, mask, pointers.shape, itemsize)]
        return self._split(flat, mask, pointers.shape, itemsize)

    def _split(
        self, flat: Array, mask: Array | None, shape: tuple[int, ...], itemsize: int
    ) -> list[Access]:
        size = int(np.prod(shape))
        positions = np.arange(size) if mask is None else np.flatnonzero(mask)
        owner = np.searchsorted(np.array(self.bases), flat, "right") - 1
        out = []
        for i in np.unique(owner):
            here = owner == i
            r = self.regions[i]
            offsets = flat[here] - r.base
            if offsets.max() + itemsize > r.nbytes:
                bad = first_beyond(offsets, r.nbytes, itemsize)
                raise self._fault(r.base + bad, itemsize)
            select = np.zeros(size, np.bool_)
            select[positions[here]] = True
            out.append(self._list(r, offsets, select.reshape(shape), shape, itemsize))
        return out

    @staticmethod
    def _misaligned(r: Region, address: int, itemsize: int) -> MemoryFault:
        index = (address - r.base) // r.itemsize
        text = f"misaligned access of {itemsize} bytes at {address:#x}, inside {r.name}[{index}]"
        return MemoryFault(text, region=r.name, index=index)

    def _list(
        self, r: Region, offsets: Array, select: Array | None, shape: tuple[int, ...], itemsize: int
    ) -> Access:
        if itemsize < r.grain:
            r.refine(itemsize)
        lo, hi = int(offsets.min()), int(offsets.max()) + itemsize
        if itemsize > 1 and (bad := (offsets + r.base) % itemsize).any():
            raise self._misaligned(r, r.base + int(offsets[int(np.argmax(bad))]), itemsize)
        return Access(r, itemsize, shape, 0, None, offsets, select, lo, hi, offsets.size * itemsize)
