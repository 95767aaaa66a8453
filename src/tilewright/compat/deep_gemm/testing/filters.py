"""Filters of tests by the GPU's architecture, and tests without an environment variable."""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from tilewright.hardware import device_info

Test = Callable[..., Any]


def get_arch_major() -> int:
    """First number of the GPU's compute capability: 9 for Hopper; without a GPU, that of the planned one."""
    return int(device_info("cuda").arch.removeprefix("sm_")) // 10


def test_filter(condition: Callable[[], bool]) -> Callable[[Test], Test]:
    """Run the decorated test if `condition()` is true, else print that it was left out.

    The condition is evaluated at each call, because it may need a GPU.
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


test_filter.__test__ = False  # type: ignore[attr-defined]  # else pytest collects it as a test


def ignore_env(name: str, condition: Callable[[], bool]) -> Callable[[Test], Test]:
    """Run the decorated test without the environment variable `name` if `condition()` is true, and restore it
    afterwards, also if the test raises.
    """

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            saved = os.environ.pop(name, None) if condition() else None
            try:
                return test(*args, **kwargs)
            finally:
                if saved is not None:
                    os.environ[name] = saved

        return wrapped

    return decorate
