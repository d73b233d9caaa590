"""Source sites: which line of the user's code performs an access."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType, FrameType

import triton

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TRITON = os.path.dirname(os.path.abspath(triton.__file__)) + os.sep
_is_user: dict[CodeType, bool] = {}

MAX_SITES = 1 << 14


def is_user_code(code: CodeType) -> bool:
    """Whether `code` belongs neither to triton nor to the executor."""
    known = _is_user.get(code)
    if known is None:
        name = code.co_filename
        known = not name.startswith((_TRITON, _HERE, "<"))
        _is_user[code] = known
    return known


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of user code at or above `frame`."""
    while frame is not None:
        known = _is_user.get(frame.f_code)
        if known is None:
            known = is_user_code(frame.f_code)
        if known:
            return frame
        frame = frame.f_back
    return None


class Sites:
    """Numbers source lines; 0 means "host code"."""

    def __init__(self) -> None:
        self._ids: dict[tuple[CodeType, int], int] = {}
        self._sites: list[tuple[str, int, str]] = [("", 0, "")]
        # Text of lines that a Mutation changed: (file, line) -> text.
        self.changed: dict[tuple[str, int], str] = {}

    def here(self) -> int:
        """Number of the user line that is executing."""
        frame = user_frame(sys._getframe(1))
        if frame is None:
            return 0
        key = (frame.f_code, frame.f_lineno)
        number = self._ids.get(key)
        if number is None:
            if len(self._sites) >= MAX_SITES:
                return 0
            number = self._ids[key] = len(self._sites)
            self._sites.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        return number

    def stack(self) -> list[str]:
        """Lines of user code that are executing, innermost first."""
        out: list[str] = []
        frame = user_frame(sys._getframe(1))
        while frame is not None and len(out) < 8:
            code = frame.f_code
            out.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
            frame = user_frame(frame.f_back)
        return out

    def source(self, filename: str, line: int) -> str:
        """Text of a source line as it was executed."""
        changed = self.changed.get((filename, line))
        return changed if changed is not None else linecache.getline(filename, line).strip()

    def line(self, number: int) -> str:
        """``file:line`` of a site, ``""`` for host code."""
        if not number:
            return ""
        filename, line, _ = self._sites[number]
        return f"{os.path.basename(filename)}:{line}"

    def text(self, number: int) -> str:
        """Source text of a site."""
        if not number:
            return ""
        filename, line, _ = self._sites[number]
        return self.source(filename, line)

    def describe(self, number: int) -> str:
        """``file:line in function: `text` `` of a site, ``host code`` for 0."""
        if not number:
            return "host code"
        filename, line, name = self._sites[number]
        return f"{os.path.basename(filename)}:{line} in {name}: `{self.source(filename, line)}`"
