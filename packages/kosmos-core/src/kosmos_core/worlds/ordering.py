"""Order between fused launches of different streams on one GPU.

A fused kernel needs all its workgroups resident at once. Two of them on one GPU at the same time
may each hold SMs that the other waits for, unless both fit side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class LaunchOrder:
    """Remembers the last fused launch of each stream of one GPU.

    Args:
        num_sms: workgroups that the GPU holds at once.
    """

    def __init__(self, num_sms: int) -> None:
        self._num_sms = num_sms
        self._last: dict[Hashable, int] = {}

    def enter(self, stream: Hashable, num_wgs: int, wait_for: Callable[[Hashable], None]) -> None:
        """Before a launch of `num_wgs` workgroups on `stream`.

        Args:
            stream: where the launch goes.
            num_wgs: its workgroups.
            wait_for: makes `stream` wait for all that another stream holds so far.
        """
        if len(self._last) > 1 or (self._last and stream not in self._last):
            others = {s: n for s, n in self._last.items() if s != stream}
            # Together they must fit: a launch may meet the last one of every other stream.
            if num_wgs + sum(others.values()) > self._num_sms:
                for other in others:
                    wait_for(other)
                    del self._last[other]
        self._last[stream] = num_wgs
