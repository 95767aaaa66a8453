"""What dispatch remembers of signatures, within a bound of host memory: the oldest entry goes first."""

import sys
from threading import Lock
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch

K = TypeVar("K")
V = TypeVar("V")

_SHARED = (type, ModuleType, FunctionType, BuiltinFunctionType, torch.dtype, torch.device)
"""Kinds of objects that exist once, however many references there are."""


class Bounded(dict[K, V]):
    """A dictionary that `put` keeps within `limit` bytes, keys and values counted.  Looked up as any dictionary."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._sizes: dict[Any, int] = {}
        self._total = 0
        self._lock = Lock()

    def put(self, key: K, value: V) -> None:
        """Keep `value`, as the newest; older entries leave until all fit, and a value beyond the limit is not kept."""
        size = host_bytes((key, value))
        with self._lock:
            self._drop(key)
            if size > self.limit:
                return
            while self._total + size > self.limit:
                self._drop(next(iter(self._sizes)))
            self[key] = value
            self._sizes[key] = size
            self._total += size

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            super().clear()
            self._sizes.clear()
            self._total = 0

    def _drop(self, key: Any) -> None:
        self._total -= self._sizes.pop(key, 0)
        self.pop(key, None)


def host_bytes(value: Any) -> int:
    """Bytes of host memory of `value` and what it refers to; functions, types and modules are not counted."""
    counted: set[int] = set()
    waiting, total = [value], 0
    while waiting:
        item = waiting.pop()
        if id(item) in counted or isinstance(item, _SHARED):
            continue
        counted.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, tuple | list | set | frozenset):
            waiting += item
        elif isinstance(item, MethodType):
            waiting.append(item.__self__)
        else:
            slots = getattr(type(item), "__slots__", ())
            waiting += [getattr(item, name, None) for name in ((slots,) if isinstance(slots, str) else slots)]
            waiting.append(getattr(item, "__dict__", None))
    return total
