"""Who did it: a stack of module paths kept by hooks while a model runs, for costs, memory and profiler labels.

Compiled modules are one unit: a hook on them, or inside them, would be traced into the graph and recompile it. They are
labelled from outside, around the compiled call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

Enter = Callable[[str, nn.Module], AbstractContextManager[Any]]


def visible_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module in order, not looking inside compiled ones. The model's own path is ""."""
    yield from _walk("", model)


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` is in force."""
    return getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def around_modules(model: nn.Module, enter: Enter) -> Iterator[None]:
    """While open, each call of a visible module runs inside `enter(path, module)`."""
    undo: list[Callable[[], None]] = []
    open_calls: list[AbstractContextManager[Any]] = []

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, *_: Any) -> None:
            context = enter(path, module)
            context.__enter__()
            open_calls.append(context)

        return hook

    def after(*_: Any) -> None:
        open_calls.pop().__exit__(None, None, None)

    try:
        for path, module in list(visible_modules(model)):
            if is_compiled(module):
                undo.append(_wrap_compiled(path, module, enter))
            else:
                undo.append(module.register_forward_pre_hook(before(path), prepend=True).remove)
                undo.append(module.register_forward_hook(after).remove)
        yield
    finally:
        while open_calls:  # calls that raised never reached their second hook
            after()
        for remove in undo:
            remove()


def _walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    if is_compiled(module):
        return
    for name, child in module.named_children():
        yield from _walk(f"{path}.{name}" if path else name, child)


def _wrap_compiled(path: str, module: nn.Module, enter: Enter) -> Callable[[], None]:
    compiled: Any = module._compiled_call_impl

    def labelled(*args: Any, **kwargs: Any) -> Any:
        with enter(path, module):
            return compiled(*args, **kwargs)

    def restore() -> None:
        object.__setattr__(module, "_compiled_call_impl", compiled)

    object.__setattr__(module, "_compiled_call_impl", labelled)
    return restore
