"""Simulated memory of all ranks: registered regions and how pointers resolve to them."""

from __future__ import annotations

import bisect
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .access import Access, Array, affine_strides, prefix_rectangle
from .errors import MemoryFault

if TYPE_CHECKING:
    from .clocks import SyncVar
    from .races import ReadLog
    from .stale import StaleLog
    from .tasks import WorkGroup
    from .weak import Dirty

_REDZONE = 256
_ALIGN = 256
# Look for dead tensors once this many have been registered by launches.
_COLLECT_AT = 256


def version_of(tensor: torch.Tensor) -> int:
    """How often in-place operations have written the tensor (0 if torch does not count)."""
    return 0 if tensor.is_inference() else int(tensor._version)


def _use_count(storage: torch.UntypedStorage) -> int:
    return int(torch._C._storage_Use_Count(storage._cdata))


class Region:
    """One allocation: the bytes, and all that the executor knows about them.

    Attributes:
        base, nbytes: address range.
        mem: the bytes, as NumPy uint8.
        rank: owning rank.
        name: for reports.
        itemsize: bytes an element (for reports and shadow memory).
        tensor: a torch tensor on the same storage; its version counter shows host writes.
        version: version of `tensor` that has been accounted for.
        watch: parked workgroups and the byte ranges they poll.
        sentinel: bit pattern of "not here yet" in a region polled in its data, or None.
        coherent: per-location coherence assumed for such polls.
    """

    __slots__ = (
        "atomics", "base", "base_write", "coherent", "dirty", "grain", "itemsize", "log", "mem",
        "name", "nbytes", "pinned", "poison", "rank", "reads", "sentinel", "sync", "tensor",
        "users", "version", "views", "watch", "writes",
    )  # fmt: skip

    def __init__(
        self, base: int, nbytes: int, rank: int, name: str, itemsize: int, tensor: torch.Tensor
    ) -> None:
        self.base = base
        self.nbytes = nbytes
        self.rank = rank
        self.name = name
        self.itemsize = itemsize
        self.tensor = tensor
        self.version = version_of(tensor)
        self.pinned = False
        # Unfinished launches that have received it.
        self.users = 0
        self.mem: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base))
        self.watch: list[tuple[int, int, WorkGroup]] = []
        # Weak memory: what each rank sees (gpu-scope releases), bytes not yet visible to others.
        self.views: dict[int, Array] = {}
        self.dirty: dict[int, Dirty] = {}
        self.log: StaleLog | None = None
        # Race detector.
        self.grain = itemsize if itemsize in (1, 2, 4, 8) else 1
        self.base_write = 0
        self.writes: Array | None = None
        self.atomics: Array | None = None
        self.poison: Array | None = None
        self.reads: ReadLog | None = None
        self.sync: dict[int, SyncVar] = {}
        self.sentinel: int | None = None
        self.coherent = False

    def index(self, offset: int) -> int:
        """Element index of a byte offset."""
        return offset // self.itemsize

    def where(self, offset: int) -> str:
        """``name[index] (rank r)`` of a byte offset."""
        return f"{self.name}[{offset // self.itemsize}] (rank {self.rank})"

    def host_changed(self) -> None:
        """Host code has written the bytes: what ranks see follows, but for unpublished stores."""
        self.log = None
        for rank, view in self.views.items():
            keep = self.dirty[rank].mask != 0
            np.copyto(view, self.mem, where=~keep)

    def refine(self, grain: int) -> None:
        """Make shadow entries at most `grain` bytes wide (an access was narrower)."""
        k = self.grain // grain
        for name in ("writes", "atomics", "poison"):
            array = getattr(self, name)
            if array is not None:
                setattr(self, name, np.repeat(array, k))
        self.grain = grain


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
        itemsize = torch.empty(0, dtype=dtype).element_size()
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
        raw = torch.empty(nbytes + _ALIGN + 2 * _REDZONE, dtype=torch.uint8)
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

    def _fault(self, lo: int, hi: int) -> MemoryFault:
        i = bisect.bisect(self.bases, lo) - 1
        near, name, index = "no tensor lies below it", "", -1
        if i >= 0:
            r = self.regions[i]
            name, index = r.name, (lo - r.base) // r.itemsize
            near = (
                f"nearest below: {r.name} (rank {r.rank}, {r.nbytes // r.itemsize} elements), "
                f"as its element {index}"
            )
        text = f"access [{lo:#x}, {hi:#x}) is outside every registered tensor; {near}"
        return MemoryFault(text, region=name, index=index)

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
            raise self._fault(address, hi)
        if hi > r.base + r.nbytes:
            raise self._fault(r.base + r.nbytes, hi)
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
            raise self._fault(lo, hi)
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
            if i < 0 or offsets.max() + itemsize > r.nbytes:
                bad = int(flat[here][int(np.argmax(offsets))])
                raise self._fault(bad, bad + itemsize)
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
