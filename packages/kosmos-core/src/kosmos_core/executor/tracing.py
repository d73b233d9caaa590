"""Trace of a run, in the JSON format that Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .executor import Executor
    from .tasks import WorkGroup

_Event = tuple[int, int, str, str, int, int, str, dict[str, Any]]


class Tracer:
    """Collects spans; times are those of the device clock, in ns."""

    def __init__(self) -> None:
        self.events: list[_Event] = []

    def span(
        self, w: WorkGroup, name: str, start: int, end: int, category: str, **args: Any
    ) -> None:
        """A span of a workgroup."""
        self.events.append((w.rank, w.wg, repr(w), name, start, end, category, args))

    def device_function(
        self,
        ex: Executor,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a device function inside a span."""
        w = ex.current
        start = ex.clock.now(w)
        out = fn(*args, **kwargs)
        self.span(w, name, start, ex.clock.now(w), "device_function")
        return out

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the trace; returns the number of events."""
        out: list[dict[str, Any]] = []
        seen: set[object] = set()
        for rank, wg, label, name, start, end, category, args in self.events:
            if rank not in seen:
                seen.add(rank)
                meta = {"name": "process_name", "ph": "M", "pid": rank}
                out.append({**meta, "args": {"name": f"rank {rank}"}})
            if (rank, wg) not in seen:
                seen.add((rank, wg))
                meta = {"name": "thread_name", "ph": "M", "pid": rank, "tid": wg}
                out.append({**meta, "args": {"name": label}})
            times = {"ts": start / 1000, "dur": max(end - start, 1) / 1000}
            what = {"name": name, "cat": category, "ph": "X", "args": args}
            out.append({**what, "pid": rank, "tid": wg, **times})
        with open(path, "w", encoding="utf-8") as f:
            json.dump({"traceEvents": out, "displayTimeUnit": "ns"}, f)
        return len(out)
