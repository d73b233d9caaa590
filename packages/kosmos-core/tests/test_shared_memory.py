"""How the processes of a group come to share memory, and that all of them hear where one cannot."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as symm_mem
from kosmos_core.errors import WorldError
from kosmos_core.worlds import shared
from kosmos_core.worlds.shared import GroupMemory

# What rank 1 says at each step of each way: allocate, rendezvous; export, its handle, import.
WELL = [None, None, None, "its handle", None]


def memory(says: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[GroupMemory, list[Any]]:
    """Rank 0 of two, whose peer says what it is given; and what rank 0 says."""
    said: list[Any] = []
    answers = iter(says)

    def gather(value: Any) -> list[Any]:
        said.append(value)
        return [value, next(answers)]

    monkeypatch.setattr(symm_mem, "empty", lambda n, dtype, device: torch.zeros(n, dtype=dtype))
    monkeypatch.setattr(
        symm_mem, "rendezvous", lambda t, group: SimpleNamespace(buffer_ptrs=[t.data_ptr(), 4096])
    )
    monkeypatch.setattr(shared.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(shared, "exported", lambda t: "handle")
    monkeypatch.setattr(shared, "imported", lambda theirs, device: torch.UntypedStorage(8))
    return GroupMemory(torch.device("cpu"), None, gather), said  # type: ignore[arg-type]


def failing(text: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"{text}\nwith details")

    return fail


def test_symmetric_memory_is_taken_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    some, said = memory(WELL, monkeypatch)
    buffer = some.allocate("words", 8, torch.int64)
    assert buffer.addresses == (buffer.local.data_ptr(), 4096)
    assert said == [None, None]


def test_without_a_rendezvous_on_this_rank_memory_is_shared_by_ipc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some, said = memory([*WELL, None, "its handle", None], monkeypatch)
    monkeypatch.setattr(symm_mem, "rendezvous", failing("pidfd_getfd: not permitted"))
    buffer = some.allocate("words", 8, torch.int64)
    assert buffer.addresses[0] == buffer.local.data_ptr()
    assert buffer.addresses[1] == buffer.handle[1].data_ptr()
    assert said == [None, "RuntimeError: pidfd_getfd: not permitted", None, "handle", None]
    # From then on at once.
    some.allocate("more words", 8, torch.int64)
    assert said[5:] == [None, "handle", None]


@pytest.mark.parametrize("step", [0, 1])
def test_where_a_peer_has_no_symmetric_memory_this_rank_takes_ipc_too(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    some, said = memory([None] * step + ["lost", *WELL[2:]], monkeypatch)
    buffer = some.allocate("words", 8, torch.int64)
    assert buffer.addresses[1] == buffer.handle[1].data_ptr()
    assert said == [None] * (step + 2) + ["handle", None]


def test_where_nothing_works_every_rank_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rank 1 is out of memory, and rank 0 cannot export: both raise, and neither waits.
    some, said = memory(["OutOfMemoryError: all of it", None], monkeypatch)
    monkeypatch.setattr(shared, "exported", failing("no IPC here"))
    with pytest.raises(WorldError) as caught:
        some.allocate("words", 8, torch.int64)
    told = str(caught.value)
    assert told.startswith("symmetric memory 'words' of 64 bytes: allocation of symmetric memory")
    assert "failed on ranks [1] (OutOfMemoryError: all of it)" in told
    assert "export of memory by IPC failed on ranks [0] (RuntimeError: no IPC here)" in told
    assert "doctor" in told
    assert said == [None, "RuntimeError: no IPC here"]
