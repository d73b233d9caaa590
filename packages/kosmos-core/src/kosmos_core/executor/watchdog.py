"""Stops a kernel that runs too long without a synchronisation operation."""

from __future__ import annotations

import ctypes
import threading
import time

from .errors import WatchdogBite


class Watchdog:
    """Watches the thread that runs workgroups, and raises `WatchdogBite` in it.

    It needs no signal, so it works in any thread.

    Args:
        seconds: how long one workgroup may run without giving way.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        # Number of the step that runs now, 0 between steps; written by the watched thread.
        self.step = 0
        self._target = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Watch the calling thread."""
        self._target = threading.get_ident()
        self._stop.clear()
        self._thread = threading.Thread(target=self._watch, name="executor watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        step, since = 0, time.monotonic()
        while not self._stop.wait(min(self.seconds / 4, 0.5)):
            now = time.monotonic()
            if self.step != step:
                step, since = self.step, now
            elif step and now - since > self.seconds:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._target), ctypes.py_object(WatchdogBite)
                )
                return
