"""Deadlock and fault reports: who waits for what, on which line."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import triton.language as tl

from .errors import Deadlock, KernelFault, MemoryFault, Wait
from .numerics import Handle
from .sites import is_user_code, user_frame

if TYPE_CHECKING:
    from .executor import Executor
    from .tasks import Look, WorkGroup

_MAX_FRAMES = 4
_WANTED_NAMES = ("want", "wanted", "target", "expected", "expect", "need", "goal", "epoch")
_COMPARISONS = {
    ast.Lt: ">=", ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
_MIRRORED = {">=": "<=", "<=": ">=", ">": "<", "<": ">", "==": "==", "!=": "!="}


def deadlock(ex: Executor, reason: str) -> Deadlock:
    """Report of all live workgroups and blocked hosts."""
    live = ex.scheduler.live
    lines = [f"DEADLOCK: {reason}: {len(live)} live workgroups, {len(ex.scheduler.hosts)} hosts"]
    waits = []
    for w in live:
        wait, frames = _wait(ex, w)
        waits.append(wait)
        wanted = f", wanted {wait.wanted}" if wait.wanted else ""
        where = f"{wait.region}[{wait.index}] (rank {wait.rank})" if wait.region else "nothing"
        verb = "polls" if w.num_polls else "last read" if wait.region else "has polled"
        lines.append(
            f"  {wait.wg} ({wait.kernel}): {verb} {where}, seen {wait.seen or '-'}{wanted}, "
            f"{w.num_polls} polls, at {wait.line} `{wait.source}`"
        )
        lines += [f"      {text}" for text in frames]
    lines += [f"  {text}" for text in ex.scheduler.streams.waiting()]
    hosts = tuple(f"{h!r}: {h.why or 'has not run'}" for h in ex.scheduler.hosts)
    lines += [f"  {text}" for text in hosts]
    return Deadlock("\n".join(lines), tuple(waits), hosts)


def main_poll(w: WorkGroup) -> Look | None:
    """Which of the polls of its loop `w` waits for.

    A loop may also look at a word that says whether to give up: a poll that acquires comes before
    one that does not, and one of polled data before others.
    """
    latest = {(p[0], p[1], p[2]): p for p in w.trail}
    polls = sorted(latest.values(), key=lambda p: (not p[4], p[1].sentinel is None, p[0]))
    spinning = {key for key in latest if (key[0], key[1].base + key[2]) in w.seen}
    for p in polls:
        if (p[0], p[1], p[2]) in spinning:
            return p
    return w.trail[-1] if w.trail else None


def _wait(ex: Executor, w: WorkGroup) -> tuple[Wait, list[str]]:
    poll = main_poll(w)
    frame = user_frame(w.greenlet.gr_frame if w.greenlet is not None else None)
    if poll is None or not w.num_polls:
        line, source = "", ""
        if frame is not None:
            filename = frame.f_code.co_filename
            line = f"{os.path.basename(filename)}:{frame.f_lineno}"
            source = ex.sites.source(filename, frame.f_lineno)
    else:
        line, source = ex.sites.line(poll[0]), ex.sites.text(poll[0])
    wait = Wait(
        wg=repr(w),
        kernel=w.launch.name,
        region="" if poll is None else poll[1].name,
        index=-1 if poll is None else poll[1].index(poll[2]),
        rank=-1 if poll is None else poll[1].rank,
        line=line,
        source=source,
        seen="" if poll is None else _shorten(poll[3]),
        wanted=_wanted(frame),
    )
    return wait, _frames(ex, frame)


def _shorten(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _frames(ex: Executor, frame: FrameType | None) -> list[str]:
    out: list[str] = []
    while frame is not None and len(out) < _MAX_FRAMES:
        code = frame.f_code
        source = ex.sites.source(code.co_filename, frame.f_lineno)
        names = dict.fromkeys(re.findall(r"[A-Za-z_]\w*", source))
        values = [f"{n}={v}" for n in names if (v := _text(ex, frame.f_locals.get(n))) is not None]
        place = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        out.append(f"{place}: `{source}` {{{', '.join(values)}}}")
        frame = user_frame(frame.f_back)
    return out


def _text(ex: Executor, value: Any) -> str | None:
    """A scalar local variable as text."""
    if isinstance(value, tl.constexpr):
        value = value.value
    if isinstance(value, (int, float, str)):
        return str(value)
    if isinstance(value, tl.tensor) and isinstance(value.handle, Handle):
        data = value.handle.data
        if data.size == 1:
            if value.dtype.is_ptr():
                return ex.memory.describe(int(data.reshape(-1)[0]))
            return str(data.reshape(-1)[0])
    return None


def _scalar(value: Any) -> str | None:
    if isinstance(value, tl.tensor) and value.dtype.is_ptr():
        return None
    if isinstance(value, (tl.tensor, tl.constexpr, int, float)) and not isinstance(value, bool):
        if isinstance(value, tl.tensor):
            data = value.handle.data
            return str(data.reshape(-1)[0]) if data.size == 1 else None
        return str(value.value if isinstance(value, tl.constexpr) else value)
    return None


def _wanted(frame: FrameType | None) -> str:
    """What the polling loop compares with, from its condition or from a variable's name."""
    depth = 0
    while frame is not None and depth < _MAX_FRAMES:
        out = _from_condition(frame) or _from_names(frame)
        if out:
            return out
        frame = user_frame(frame.f_back)
        depth += 1
    return ""


def _from_names(frame: FrameType) -> str:
    for name in _WANTED_NAMES:
        text = _scalar(frame.f_locals.get(name))
        if text is not None:
            return text
    return ""


def _from_condition(frame: FrameType) -> str:
    """Negation of the ``while`` condition around the current line, if it compares a call."""
    node = _enclosing_while(frame.f_code, frame.f_lineno)
    if node is None or not isinstance(node.test, ast.Compare) or len(node.test.ops) != 1:
        return ""
    operator = _COMPARISONS.get(type(node.test.ops[0]))
    left, right = node.test.left, node.test.comparators[0]
    if operator is None:
        return ""
    if isinstance(right, ast.Call) and not isinstance(left, ast.Call):
        left, right, operator = right, left, _MIRRORED[operator]
    if not isinstance(left, ast.Call):
        return ""
    text = _constant(right, frame)
    return f"{operator} {text}" if text else ""


def _constant(node: ast.expr, frame: FrameType) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        value = frame.f_locals.get(node.id, frame.f_globals.get(node.id))
        return _scalar(value) or ""
    return ""


@functools.lru_cache(maxsize=64)
def _whiles(text: str) -> tuple[ast.While, ...]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.While))


def _enclosing_while(code: CodeType, line: int) -> ast.While | None:
    text = "".join(linecache.getlines(code.co_filename))
    around = [n for n in _whiles(text) if n.lineno <= line <= (n.end_lineno or line)]
    return max(around, key=lambda n: n.lineno, default=None)


def fingerprint(w: WorkGroup) -> int:
    """Hash of the local variables of a suspended workgroup.

    It tells a loop that counts its polls from one that would go on for ever.
    """
    parts: list[Any] = []
    frame = user_frame(w.greenlet.gr_frame if w.greenlet is not None else None)
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, tl.tensor) and isinstance(value.handle, Handle):
                if value.handle.data.size <= 64:
                    parts.append(value.handle.data.tobytes())
            elif isinstance(value, (int, float, str)):
                parts.append(value)
        frame = user_frame(frame.f_back)
    return hash(tuple(parts))


def kernel_fault(ex: Executor, w: WorkGroup, error: BaseException) -> KernelFault:
    """An exception in a kernel, with workgroup, line and source text."""
    tb = error.__traceback__
    line, where = "", ""
    while tb is not None:
        code = tb.tb_frame.f_code
        if is_user_code(code):
            line = f"{os.path.basename(code.co_filename)}:{tb.tb_lineno}"
            source = ex.sites.source(code.co_filename, tb.tb_lineno)
            where = f" at {line} in {code.co_name}: `{source}`"
        tb = tb.tb_next
    text = f"{w} ({w.launch.name}){where}: {type(error).__name__}: {error}"
    if isinstance(error, MemoryFault):
        return MemoryFault(text, wg=repr(w), line=line, region=error.region, index=error.index)
    return KernelFault(text, wg=repr(w), line=line)
