"""Change what one module instance runs by changing its class, and change it back.

A replaced instance gets a generated subclass of its own class whose only difference is `forward`. Nothing is written
into the instance, so `undo` is `module.__class__ = original` and leaves no trace. Why a class and not
`module.forward = f`:

- `copy.deepcopy` treats functions as atoms: the copy of a module with a closure in `forward` would run the original's
  weights. A class travels with the copy.
- `pickle` and `torch.save` need a name to import. The generated class pickles as (original class, recipe) and is
  made again.
- `torch.compile` keys a traced forward on its code: all layers of one (class, recipe) share one function, so a
  regional compile traces it once, where one closure a layer would trace every layer.
- `isinstance`, `state_dict`, `extra_repr`, hooks and FSDP's own class swap keep working, because it is a subclass of
  the same name.
"""

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, ClassVar, Protocol, cast

from torch import Tensor, nn


class Recipe(Protocol):
    """What a replaced module runs: hashable, picklable, and the same for every layer that runs the same."""

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """The `forward` function that instances of `cls` will run."""


class Patched:
    """Base of every generated class: `isinstance(module, Patched)` is true for a replaced module."""

    tilewright_original: ClassVar[type[nn.Module]]
    tilewright_recipe: ClassVar[Recipe]

    @staticmethod
    def tilewright_as_is(x: Tensor) -> Tensor:
        """What a child's call becomes whose work is done elsewhere."""
        return x

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return (_new, (self.tilewright_original, self.tilewright_recipe), *state)


_generated: dict[tuple[type[nn.Module], Recipe], type[nn.Module]] = {}


def specialise(cls: type[nn.Module], recipe: Recipe) -> type[nn.Module]:
    """The subclass of `cls` that runs `recipe`; one class for each pair, under the name of `cls`."""
    if (cls, recipe) not in _generated:
        _generated[cls, recipe] = _generate(cls, recipe)
    return _generated[cls, recipe]


def _generate(cls: type[nn.Module], recipe: Recipe) -> type[nn.Module]:
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "forward": recipe.build(cls),
        "tilewright_original": cls,
        "tilewright_recipe": recipe,
    }
    metaclass: Callable[..., Any] = type(cls)
    return cast(type[nn.Module], metaclass(cls.__name__, (Patched, cls), body))


def origin(cls: type[nn.Module]) -> tuple[type[nn.Module], Recipe | None]:
    """The class and the recipe that `cls` was generated from; `cls` itself and None for any other class."""
    return (cls.tilewright_original, cls.tilewright_recipe) if issubclass(cls, Patched) else (cls, None)


def restore(module: nn.Module) -> None:
    """Give one replaced module its own class back."""
    module.__class__ = cast(Patched, module).tilewright_original


def patched_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every replaced module of `model`."""
    for path, module in model.named_modules():
        if issubclass(type(module), Patched):
            yield path, module


def rename_argument(function: Callable[..., Any], old: str, new: str) -> Callable[..., Any]:
    """The same function with one parameter renamed, so that callers may still pass it by the name the model gave it."""
    assert isinstance(function, FunctionType)
    names = tuple(new if name == old else name for name in function.__code__.co_varnames)
    code = function.__code__.replace(co_varnames=names)
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _new(cls: type[nn.Module], recipe: Recipe) -> nn.Module:
    generated = specialise(cls, recipe)
    return generated.__new__(generated)
