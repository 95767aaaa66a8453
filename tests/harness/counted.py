"""Work counted in calls: the same number on every machine, idle or busy, where seconds are not."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def calls_during(action: Callable[[], Any]) -> int:
    """Functions, Python's and C's, that `action` enters in this thread; the call of `action` is one of them."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count - 1  # the one that ends the counting
