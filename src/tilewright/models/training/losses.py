"""Find causal language models whose head and loss can be `ops.linear_cross_entropy`.

Which child is the head is known from the model; what its forward does to logits between head and loss is tried out:
as they are, capped, multiplied or divided by a number that the forward reads.  The probe runs the model's own forward
on a stand-in whose decoder returns random hidden states, once with its own head and loss and once with ours, and
compares losses and the gradients of hidden states and head.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.errors import TilewrightError
from tilewright.models.agreement import relative_error
from tilewright.models.report import Patchable
from tilewright.models.specialise import specialise
from tilewright.models.stand_in import NotReplaceable, Proposal, call, obstacle, probing, stand_in
from tilewright.models.training.head import Form, HeadRecipe, LossRecipe, standard_loss
from tilewright.models.transformers_names import decoder_output

KIND: Patchable = "loss"
HEAD = Proposal(KIND, HeadRecipe(), ("linear_cross_entropy",), "within its model's ops.linear_cross_entropy")
_WIDTH, _BATCH, _LENGTH = 16, 2, 6  # of the probe
_LIMIT = 1e-5  # relative error of two float32 orders of summation over so few numbers
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose a model with a head and a loss of its own; None for other modules.

    Raises NotReplaceable for one whose loss is another, or whose head is not a plain linear layer.
    """
    forward = inspect.getattr_static(type(module), "forward", None)
    code = inspect.unwrap(forward).__code__ if inspect.isfunction(forward) else None
    if code is None or "loss_function" not in code.co_names or not hasattr(module, "get_output_embeddings"):
        return None
    assert forward is not None
    parameters = list(inspect.signature(forward).parameters)
    if "labels" not in parameters:
        return None
    if not standard_loss(module):
        raise NotReplaceable(KIND, "its loss_function is not transformers' ForCausalLMLoss")
    if reason := obstacle(module):
        raise NotReplaceable(KIND, reason)
    head = _head(module)
    others = {name: child for name, child in module._modules.items() if child is not None and name != head}
    if not others:
        raise NotReplaceable(KIND, "has no child beside its head")
    decoder = max(others, key=lambda name: sum(1 for _ in others[name].parameters()))
    for form, where in _forms(module, code.co_names, decoder):
        recipe = LossRecipe(head, form, where, parameters.index("labels") - 1, "torch")
        if _reproduces(module, recipe, decoder):
            final = dataclasses.replace(recipe, backend=backend)
            return Proposal(KIND, final, ("linear_cross_entropy",), f"{final} (to rounding, gradients too)")
    raise NotReplaceable(KIND, "is not the cross entropy of its head's logits, plain, scaled or capped by one number")


def _head(module: Any) -> str:
    """Name of the head among the children of `module`."""
    layer = module.get_output_embeddings()
    name = next((name for name, child in module._modules.items() if child is layer and child is not None), None)
    if name is None:
        raise NotReplaceable(KIND, "its head is not a child of its own")
    weight: Any = getattr(layer, "weight", None)
    if getattr(type(layer), "forward", None) is not nn.Linear.forward or type(weight) is not nn.Parameter:
        raise NotReplaceable(KIND, f"its head {name} is {type(layer).__name__}, not a plain nn.Linear")
    if type(weight.data) is not Tensor or weight.dtype not in _FLOATS:
        raise NotReplaceable(KIND, f"the weight of its head {name} is {type(weight.data).__name__} {weight.dtype}")
    if reason := obstacle(layer):
        raise NotReplaceable(KIND, f"{name}: {reason}")
    if layer._forward_hooks or layer._forward_pre_hooks:
        raise NotReplaceable(KIND, f"{name} has hooks, which wait for logits")
    return name


def _forms(module: Any, names: tuple[str, ...], decoder: str) -> Iterator[tuple[Form, str]]:
    """What may happen to logits: nothing, or one operation with a number that the forward reads."""
    yield "plain", ""
    for name in names:
        owners = {"": module, "config.": getattr(module, "config", module), f"{decoder}.": module._modules[decoder]}
        for where, owner in ((prefix + name, vars(each)) for prefix, each in owners.items()):
            if isinstance(number := owner.get(name), (int, float)) and not isinstance(number, bool) and number:
                yield "softcap", where
                yield "multiplied", where
                yield "divided", where


class _Decoder(nn.Module):
    """Stands for all of a model below its head: returns the hidden states that it holds, and has the same numbers."""

    def __init__(self, hidden: Tensor, decoder: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(decoder).items() if isinstance(value, float)})
        self.hidden = nn.Parameter(hidden)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return decoder_output(self.hidden * 1.0)


def _reproduces(module: nn.Module, recipe: LossRecipe, decoder: str) -> bool:
    """Compare means, sums over a number of items, and labels that were shifted by the caller."""
    head: Any = module._modules[recipe.head]
    device, classes = head.weight.device, head.weight.shape[0]
    child = module._modules[decoder]
    assert child is not None
    ours = recipe.build(type(module))
    with probing(device), torch.enable_grad():
        sizes = torch.linspace(1.0, 60.0, _LENGTH, device=device)[:, None]  # large logits show a cap
        hidden = sizes * torch.randn(_BATCH, _LENGTH, _WIDTH, device=device)
        labels = torch.randint(0, classes, (_BATCH, _LENGTH), device=device)
        labels[0, :3] = -100
        linear: nn.Module = nn.Linear(_WIDTH, classes, bias=head.bias is not None, device=device)
        model = stand_in(module, children={decoder: _Decoder(hidden, child), recipe.head: linear}).train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        cases: tuple[dict[str, Any], ...] = ({}, {"num_items_in_batch": 7}, {"shift_labels": labels.roll(2, 1)})
        for options in cases:
            arguments = {"input_ids": labels.clamp_min(0), "labels": labels, **options}
            expected = call(KIND, type(module).forward, model, **arguments).loss
            linear.__class__ = specialise(nn.Linear, HEAD.recipe)
            try:
                got = call(KIND, ours, model, **arguments)
            except TilewrightError:
                return False
            finally:
                linear.__class__ = nn.Linear
            if got.logits is not None or relative_error([got.loss], [expected]) > _LIMIT:
                return False
            gradients = (torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (got.loss, expected))
            if relative_error(*gradients) > _LIMIT:
                return False
    return True
