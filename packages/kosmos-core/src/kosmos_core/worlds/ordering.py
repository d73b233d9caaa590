"""Order between fused launches of different streams on one GPU.

A fused kernel needs all its workgroups resident at once. Two of them on one GPU at the same time
may each hold SMs that the other waits for, unless both fit side by side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass
class _Held:
    """What a stream may still be running.

    Attributes:
        num_wgs: the largest of its launches, and of those of streams that it waited for.
        number: its last launch, counted over all streams.
    """

    num_wgs: int
    number: int


class LaunchOrder:
    """Remembers what each stream of one GPU may still be running.

    Threads may launch at the same time. A launch is forgotten when another stream waits for it,
    which then stands for it, and when the host has waited for the GPU.

    Args:
        num_sms: workgroups that the GPU holds at once.
    """

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms
        self._held: dict[Hashable, _Held] = {}
        self._launches = 0
        self._lock = threading.Lock()

    @property
    def launches(self) -> int:
        """How many launches there were."""
        return self._launches

    def enter(self, stream: Hashable, num_wgs: int, wait_for: Callable[[Hashable], None]) -> None:
        """Before a launch of `num_wgs` workgroups on `stream`.

        Args:
            stream: where the launch goes.
            num_wgs: its workgroups.
            wait_for: makes `stream` wait for all that another stream holds so far.
        """
        with self._lock:
            most = num_wgs
            own = self._held.get(stream)
            if own is not None:
                # Earlier launches of the stream may still run when another stream's begins.
                most = max(most, own.num_wgs)
            others = [s for s in self._held if s != stream]
            # Together they must fit: a launch may meet any one of every other stream.
            if num_wgs + sum(self._held[s].num_wgs for s in others) > self._num_sms:
                for other in others:
                    wait_for(other)
                    # Whoever waits for this stream from now on waits for the other one, too.
                    most = max(most, self._held.pop(other).num_wgs)
            self._launches += 1
            self._held[stream] = _Held(most, self._launches)

    def forget(self, launches: int) -> None:
        """After the GPU has run the first so many launches: streams with no later one are idle."""
        with self._lock:
            self._held = {s: h for s, h in self._held.items() if h.number > launches}
