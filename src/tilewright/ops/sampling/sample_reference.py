"""`sample` in plain torch: sorts instead of searches, the same integers."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewright.ops.sampling import numbers

if TYPE_CHECKING:
    from tilewright.ops.sampling.sample import SampleArgs


def draw_tokens(args: "SampleArgs") -> tuple[Tensor, Tensor]:
    """Tokens, and their log-probabilities where `args.logprobs` asks for them."""
    x = numbers.clean(args.logits)
    w, greedy = kept_weights(x, args)
    total = w.sum(-1)
    u = numbers.below(numbers.philox(args.seeds, args.positions, numbers.DRAW), total)
    tokens = numbers.draw(w, torch.where(greedy, 0, u))
    if not args.logprobs:
        return tokens, torch.empty(0, device=x.device)
    place = tokens.clamp(min=0)[:, None]
    dtype = torch.float64 if args.logits.dtype == torch.float64 else torch.float32
    if args.logprobs == 1:
        drawn = w.gather(1, place)[:, 0].to(dtype)
        logprobs = torch.where(greedy, 0.0, torch.log(drawn / total.to(dtype)))
    else:
        mass = numbers.weights(x, torch.full_like(x[:, 0], numbers.LOG2E)).sum(-1).to(dtype)
        distance = (x.amax(-1) - x.gather(1, place)[:, 0]).to(dtype)
        logprobs = -distance - torch.log(mass * 2.0**-numbers.UNIT)
    return tokens, torch.where(tokens >= 0, logprobs, -torch.inf).to(torch.float32)


def kept_weights(x: Tensor, args: "SampleArgs") -> tuple[Tensor, Tensor]:
    """Weights of clean logits, 0 for tokens that the filters drop; and which rows are greedy."""
    temperatures = _per_row(x, args.temperatures, args.temperature, torch.float32)
    greedy = ~(temperatures > 0)
    keys = numbers.ordered(x)
    w = numbers.weights(x, numbers.slopes(temperatures))
    w = torch.where(greedy[:, None] & (keys < keys.amax(-1, keepdim=True)), 0, w)
    ranked, order = keys.sort(-1, descending=True)
    if args.top_ks is not None or args.top_k:
        k = _per_row(x, args.top_ks, args.top_k, torch.int32).to(torch.int64)
        last = torch.where((k > 0) & (k < x.shape[1]), k, x.shape[1]) - 1
        w = torch.where(keys >= ranked.gather(1, last[:, None]), w, 0)
    if args.top_ps is not None or args.top_p < 1:
        running = w.gather(1, order).cumsum(-1)
        target = numbers.share(running[:, -1], _per_row(x, args.top_ps, args.top_p, torch.float32))
        last = (running < target[:, None]).sum(-1)
        w = torch.where(keys >= ranked.gather(1, last[:, None]), w, 0)
    if args.min_ps is not None or args.min_p:
        w = torch.where(w >= numbers.least(_per_row(x, args.min_ps, args.min_p, torch.float32))[:, None], w, 0)
    return w, greedy


def _per_row(x: Tensor, tensor: Tensor | None, number: float, dtype: torch.dtype) -> Tensor:
    return torch.full_like(x[:, 0], number, dtype=dtype) if tensor is None else tensor.to(dtype)
