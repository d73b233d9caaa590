"""What operations of every family do before a launch: check arguments, refuse, tell the peers.

Each refusal names the argument, what it got, what it wanted and the remedy.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from kosmos_core.errors import ArgumentError
from kosmos_core.workspace import Workspace

# Reason codes that travel to the peers (kosmos_core.peer_errors.FAULT_REASONS).
DTYPE, DEVICE, SHAPE, SIZE, WORKSPACE, CAP, ARGUMENT = range(1, 8)


class Rejected(Exception):
    """A local fault on its way to the caller: the exception to raise and the code for the peers."""

    def __init__(self, code: int, error: Exception) -> None:
        super().__init__(str(error))
        self.code = code
        self.error = error


def reject(code: int, message: str) -> Rejected:
    """A bad argument."""
    return Rejected(code, ArgumentError(message))


_NO_DISPATCH = torch.Tensor.__torch_dispatch__
# Tensors whose elements lie in memory of their own; others are looked at more closely.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def check_tensor(name: str, t: object) -> None:
    """A tensor with memory of its own, and not what merely looks like one."""
    if not isinstance(t, torch.Tensor):
        raise reject(ARGUMENT, f"{name}: got {type(t).__name__}, wanted a torch.Tensor")
    if type(t) not in _PLAIN and type(t).__torch_dispatch__ is not _NO_DISPATCH:
        raise reject(
            ARGUMENT,
            f"{name}: got {type(t).__name__}, whose elements are held by other tensors, wanted a "
            "plain tensor; pass the one it holds, such as to_local() of a DTensor",
        )
    if t.layout is not torch.strided or t.is_nested:
        kind = "a nested tensor" if t.is_nested else str(t.layout)
        raise reject(
            ARGUMENT, f"{name}: got {kind}, wanted a dense tensor; to_dense() or pad it first"
        )


def check_choice(
    name: str, value: object, allowed: tuple[str, ...], optional: bool = False
) -> None:
    """One of a few names; where optional, None leaves the choice to the plan."""
    if value is None and optional:
        return
    if not isinstance(value, str) or value not in allowed:
        raise reject(ARGUMENT, f"{name}: got {value!r}, wanted one of {', '.join(allowed)}")


def check_flag(name: str, value: object, optional: bool = False) -> None:
    """True or False; where optional, None leaves the choice to the layout."""
    if not (isinstance(value, bool) or (value is None and optional)):
        raise reject(ARGUMENT, f"{name}: got {value!r}, wanted True or False")


def check_int(name: str, value: object) -> None:
    """An integer, or None for the plan's own choice."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise reject(ARGUMENT, f"{name}: got {value!r}, wanted an integer")


def check_cap(cap: int | None) -> None:
    """A workgroup cap leaves room for a mover and a builder."""
    check_int("cap", cap)
    if cap is not None and cap < 2:
        raise reject(CAP, f"cap: got {cap}, wanted at least 2 (a mover beside a builder)")


def dense(t: torch.Tensor) -> torch.Tensor:
    """The same values, row-major and 16-byte aligned: other layouts and offsets are copied."""
    if not t.is_contiguous():
        return t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


class TellingPeers:
    """Tells the peers of whatever is raised before a launch: they must not wait for this call.

    Entered at every call: a generator would take twice the host time.

    Args:
        workspace: of the call.
        shown: gives the call as error messages show it.
    """

    __slots__ = ("_shown", "_workspace")

    def __init__(self, workspace: Workspace, shown: Callable[[], str]) -> None:
        self._workspace = workspace
        self._shown = shown

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Rejected):
            self._workspace.fault(error.code, self._shown())
            raise error.error from None
        if isinstance(error, Exception):
            self._workspace.fault(ARGUMENT, self._shown())


def chosen_options(kind: type[Any], options: Any, choices: dict[str, Any]) -> Any:
    """Options of a call, given as one object or one by one."""
    fields = kind.__dataclass_fields__
    if options is None:
        unknown = sorted(choices.keys() - fields.keys())
        if unknown:
            raise reject(
                ARGUMENT,
                f"{unknown[0]}: got a choice of this name, wanted one of {', '.join(fields)}",
            )
        return kind(**choices)
    if not isinstance(options, kind):
        raise reject(ARGUMENT, f"options: got {type(options).__name__}, wanted {kind.__name__}")
    if choices:
        raise reject(
            ARGUMENT,
            f"{', '.join(sorted(choices))}: got together with options=, wanted one or the other; "
            "use dataclasses.replace(options, ...)",
        )
    return options


def agreed_hash(*agreed: object) -> int:
    """31 bits of what all ranks must have in common."""
    return zlib.crc32(repr(agreed).encode()) & 0x7FFFFFFF
