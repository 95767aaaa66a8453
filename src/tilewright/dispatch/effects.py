"""What a call has computed where the op writes into its arguments (`RawOp.mutates`): its results, then those arguments.

`validate`, `bench` and `tuning` judge all of them alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from tilewright.dispatch.contract import Contract


def written(contract: Contract, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The tensors that a call of the public function writes into, in the order of `RawOp.mutates`."""
    names = contract.forward.mutates
    if not names:
        return ()
    arguments = {**dict(zip(inspect.signature(contract.function).parameters, args, strict=False)), **kwargs}
    return tuple(arguments[name] for name in names if isinstance(arguments.get(name), Tensor))


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """What a function returned, one tensor, several or None, as a tuple."""
    return (result,) if isinstance(result, Tensor) else () if result is None else tuple(result)


def pure(contract: Contract, function: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """`function`, the public one or its reference, without effects: it writes into copies, which follow its results."""
    if not contract.forward.mutates:
        return lambda *args, **kwargs: as_tuple(function(*args, **kwargs))

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        copies = {id(t): t.clone() for t in written(contract, args, kwargs)}
        args, kwargs = tree_map(lambda v: copies.get(id(v), v), (args, kwargs))
        return (*as_tuple(function(*args, **kwargs)), *copies.values())

    return call
