"""Linear layers that share one storage: Q, K and V below each other; gate and up row by row.

The group's weight owns the storage, (N_1 + N_2 + .., K), and each old weight becomes a view of its rows. So nothing is
stored twice, state_dict has the same keys and values, in-place updates and load_state_dict reach the group's weight,
and undo gives each weight its own storage back. A group may take over the members of another one, whose weight is let
go at once and made again on undo: at any time one layer's weights exist twice, no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilewright.errors import PatchError
from tilewright.models.fp8_linears import Fp8LinearRecipe
from tilewright.models.specialise import Recipe, origin, specialise

Arrange = Callable[[Sequence[Tensor]], tuple[Tensor, Sequence[Tensor]]]
"""Weights (N_i, K), or biases (N_i,), to one tensor of all their rows and each one's view of it."""


def below_each_other(parts: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """All rows of the first, then all of the second: columns of the product can be split."""
    merged = torch.cat(list(parts))
    return merged, merged.split([part.shape[0] for part in parts])


def interleaved(parts: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Row 0 of each, then row 1 of each, ...: what a gated epilogue reads. Views have the stride of all rows."""
    merged = torch.stack(list(parts), 1).flatten(0, 1)
    return merged, [merged[index :: len(parts)] for index in range(len(parts))]


_ATTRIBUTES = ("tilewright_group", "tilewright_at")


class Group:
    """Linear layers in one storage. `weight` is None while their devices or dtypes differ, as during `.to`."""

    def __init__(self, members: Sequence[nn.Module], classes: Sequence[type[Member]], arrange: Arrange) -> None:
        self.members = [cast(Member, member) for member in members]
        self.sizes = [member.out_features for member in self.members]
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.input: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()
        self._arrange = arrange
        self._before: list[tuple[type[nn.Module], Recipe | None, dict[str, Any]]] = []
        for index, (member, cls) in enumerate(zip(self.members, classes, strict=True)):
            attributes = {name: value for name, value in vars(member).items() if name in _ATTRIBUTES}
            self._before.append((*origin(type(member)), attributes))
            member.__class__ = cls
            member.tilewright_group = self
            member.tilewright_at = index
        try:
            self.join()
        except BaseException:  # no memory: the weights are where they were
            self._give_back()
            raise
        for former in self._formers():
            former.let_go()

    def join(self) -> None:
        """Make one storage of the members' weights, and one of their biases, and the old ones views of it."""
        if self.weight is not None and all(_shares(member.weight, self.weight) for member in self.members):
            return
        self.weight = self.bias = None
        kinds = {(member.weight.dtype, member.weight.device) for member in self.members}
        if len(kinds) > 1:
            return
        names = ["weight"] if self.members[0].bias is None else ["weight", "bias"]
        with torch.inference_mode(False), torch.no_grad():
            merged_by_name = {
                name: self._arrange([getattr(member, name).data for member in self.members]) for name in names
            }
            for name, (merged, views) in merged_by_name.items():
                setattr(self, name, merged)
                for member, view in zip(self.members, views, strict=True):
                    getattr(member, name).data = view

    def let_go(self) -> None:
        """Hold no tensor: the members belong to another group now."""
        self.weight = self.bias = self.input = None
        self.parts = ()

    def require_undoable(self) -> None:
        """Raises PatchError where the members belong to a later group, or to none any more."""
        if any(vars(member).get("tilewright_group") is not self for member in self.members):
            raise PatchError("these linears were undone already, or grouped again since. Undo the later change first.")

    def separate(self) -> None:
        """Each member is what it was, with its own storage or in the group it came from."""
        self.let_go()
        with torch.inference_mode(False), torch.no_grad():
            for member in self.members:
                for parameter in member.parameters(recurse=False):
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self._give_back()
        for former in self._formers():
            former.join()

    def _give_back(self) -> None:
        for member, (cls, recipe, attributes) in zip(self.members, self._before, strict=True):
            del member.tilewright_group, member.tilewright_at
            vars(member).update(attributes)
            cast(nn.Module, member).__class__ = cls if recipe is None else specialise(cls, recipe)

    def _formers(self) -> list[Group]:
        """The groups that members were in before, each once."""
        return list({id(g): g for *_, attributes in self._before if (g := attributes.get("tilewright_group"))}.values())


class Member(nn.Linear):
    """A linear layer in a group; joins again whenever its parameters may have been replaced."""

    tilewright_group: Group
    tilewright_at: int

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)
        self.tilewright_group.join()
        return moved

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.tilewright_group.join()


def refusal(group: Sequence[nn.Module], model: nn.Module) -> str | None:
    """Why these layers cannot share a storage; None when they can."""
    for member in group:
        if isinstance(member, Member):
            return "a projection is in a group already."
        if isinstance(origin(type(member))[1], Fp8LinearRecipe):
            return "a projection was patched to float8, and merging would run it in its own dtype again."
        if origin(type(member))[0] is not nn.Linear:
            return f"a projection is a {type(member).__name__}, not a plain nn.Linear: its weight is its own affair."
        weight: Any = member.weight
        if type(weight.data) is not Tensor or not weight.is_floating_point():
            return f"a projection's weight is a {type(weight.data).__name__}, {weight.dtype}: no plain rows."
    kinds = {(member.weight.dtype, member.weight.device, member.bias is None) for member in group}
    if len(kinds) > 1:
        return "the projections of a group differ in dtype, device or in having a bias."
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    if any(owners[id(p)] > 1 for member in group for p in member.parameters(recurse=False)):
        return "a projection's weight is tied to another module; moving its storage would break the tie."
    return None


def _shares(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
