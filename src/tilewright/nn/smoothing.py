"""SmoothQuant (arXiv 2211.10438): move outliers of activations into weights before both are cast to int8.

(x / s) @ (W * s).T is x @ W.T for any positive s, one factor for each of K channels; dividing the weight of the norm in
front by s makes the norm write x / s.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.nn.norm import AddRMSNorm, LayerNorm, RMSNorm


def smoothing_factors(activation_amax: Tensor, weight_amax: Tensor, alpha: float = 0.5) -> Tensor:
    """s = activation_amax^alpha / weight_amax^(1 - alpha): (K,) float32.

    activation_amax, weight_amax: (K,), the largest magnitudes of each input channel.   alpha: 0 to 1, how much of the
    range moves into the weights.  A channel where either is 0, or where s would not be finite and positive, has s = 1.
    """
    if activation_amax.dim() != 1 or activation_amax.shape != weight_amax.shape:
        shapes = f"{tuple(activation_amax.shape)} and {tuple(weight_amax.shape)}"
        raise InputError(f"smoothing_factors: activation_amax and weight_amax are {shapes}; needs (K,) for both.")
    if not 0.0 <= alpha <= 1.0:
        raise InputError(f"smoothing_factors: alpha is {alpha}; needs 0 to 1.")
    x_amax, w_amax = activation_amax.to(torch.float32), weight_amax.to(torch.float32)
    factors = x_amax.pow(alpha) / w_amax.pow(1.0 - alpha)
    usable = (x_amax > 0) & (w_amax > 0) & factors.isfinite() & (factors > 0)
    return torch.where(usable, factors, 1.0)


@torch.no_grad()
def observed_amax(linears: Mapping[str, nn.Linear], run: Callable[[], object]) -> dict[str, Tensor]:
    """Largest magnitude of each input channel, (K,) float32, of every layer while `run()` calls the model.

    A layer that is not called has zeros.
    """
    amax = {path: torch.zeros(linear.in_features, device=linear.weight.device) for path, linear in linears.items()}

    def watch(path: str) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            if x.numel():
                largest = x.detach().abs().reshape(-1, x.shape[-1]).amax(0)
                torch.maximum(amax[path], largest.to(torch.float32), out=amax[path])

        return before

    handles = [linear.register_forward_pre_hook(watch(path), with_kwargs=True) for path, linear in linears.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return amax


@torch.no_grad()
def smooth_(
    norm: nn.Module,
    linears: Sequence[nn.Linear],
    activation_amax: Tensor,
    alpha: float = 0.5,
    *,
    offset: float | None = None,
) -> Tensor:
    """Fold factors into `norm` and all `linears` that read its result, in place; returns the factors (K,).

    norm: has a weight (K,), perhaps a bias, and multiplies by `offset + weight`.
    offset: 1.0 for Gemma's form, 0.0 for others; needed unless `norm` is one of torch or tilewright, which say so.
    activation_amax: (K,), largest magnitude of each channel of the norm's result over calibration data.
    Nothing else may read the norm's result, or its reader sees x / s.  The new weights are rounded to their dtypes.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        raise InputError(f"smooth_: norm is {type(norm).__name__}; needs a module with a weight (K,).")
    if not linears:
        raise InputError("smooth_: linears is empty; needs the layers that read the norm's result.")
    for linear in linears:
        if linear.weight.dim() != 2 or linear.weight.shape[1] != weight.shape[0]:
            raise InputError(f"smooth_: a weight is {tuple(linear.weight.shape)}; needs (N, {weight.shape[0]}).")
        if not linear.weight.is_floating_point() or linear.weight.itemsize < 2:
            raise InputError(f"smooth_: a weight is {linear.weight.dtype}; smooth before the cast.")
    if len({id(linear.weight) for linear in linears}) < len(linears):
        raise InputError("smooth_: two of linears share their weight, which can be scaled only once. Give it once.")
    if offset is None:
        offset = _offset_of(norm)
    weight_amax = torch.stack([linear.weight.abs().amax(0).to(torch.float32) for linear in linears]).amax(0)
    factors = smoothing_factors(activation_amax.to(weight_amax.device), weight_amax, alpha)
    weight.copy_((weight.to(torch.float32) + offset) / factors.to(weight.device) - offset)
    bias = getattr(norm, "bias", None)
    if isinstance(bias, Tensor):
        bias.copy_(bias.to(torch.float32) / factors.to(bias.device))
    for linear in linears:
        linear.weight.copy_(linear.weight.to(torch.float32) * factors)
    return factors


def _offset_of(norm: nn.Module) -> float:
    if isinstance(norm, RMSNorm | AddRMSNorm):
        return norm.offset
    if isinstance(norm, LayerNorm | nn.LayerNorm | nn.RMSNorm):
        return 0.0
    raise InputError(
        f"smooth_: norm is {type(norm).__name__}, which may multiply by its weight or by 1 + weight. Give offset=0.0 "
        "or offset=1.0."
    )
