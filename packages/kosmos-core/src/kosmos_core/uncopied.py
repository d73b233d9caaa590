"""What copies of a layer share with it."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


class Uncopied:
    """A thing whose memory or ranks other processes hold a part of: it is its own only copy."""

    def __copy__(self: T) -> T:
        return self

    def __deepcopy__(self: T, memo: object) -> T:
        return self

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"{type(self).__name__}: got pickled, which what ranks share cannot be; save the "
            "layers' state_dict() and make it anew on every rank"
        )
