"""Which tests of a program run where: by the GPU's architecture, and without a variable of the environment."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from tilewright.hardware import device_info

Test = Callable[..., Any]


def get_arch_major() -> int:
    """First number of the GPU's compute capability: 9 for Hopper; without a GPU, of the one that is planned for."""
    return int(device_info("cuda").arch.removeprefix("sm_")) // 10


def test_filter(condition: Callable[[], bool]) -> Callable[[Test], Test]:
    """Let the decorated test run where `condition()` is true, and elsewhere print that it was left out.

    It is asked at each call, as it may need a GPU.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            if condition():
                return test(*args, **kwargs)
            sys.stdout.write(f"{test.__name__}: left out, as its condition does not hold here\n")
            return None

        return filtered

    return decorate


test_filter.__test__ = False  # type: ignore[attr-defined]  # or pytest takes it for a test


def ignore_env(name: str, condition: Callable[[], bool]) -> Callable[[Test], Test]:
    """Let the decorated test run without the variable `name` where `condition()` is true; it is back afterwards, also
    if the test raises.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def without(*args: Any, **kwargs: Any) -> Any:
            kept = os.environ.pop(name, None) if condition() else None
            try:
                return test(*args, **kwargs)
            finally:
                if kept is not None:
                    os.environ[name] = kept

        return without

    return decorate
