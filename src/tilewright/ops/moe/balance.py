"""How evenly experts are used: statistics and losses of a router, in plain torch, and routers that need no kernel.

`switch`, `expert_choice` and `hashed` are compositions of torch's softmax, a stable sort and arithmetic; what they give
is what `fused_moe` takes.  Routers with kernels are `topk_softmax` and, with groups and a bias, `topk_sigmoid`.

All are differentiable in the logits where they depend on them; under `torch.compile` Inductor fuses them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.moe.routing import largest


class Load(NamedTuple):
    """counts: (E,) int64 slots of each expert.   fraction: (E,) fp32, their share.   imbalance: the largest share times
    E, 1.0 where all are alike.   dropped: slots of no expert.
    """

    counts: Tensor
    fraction: Tensor
    imbalance: Tensor
    dropped: Tensor


def load_stats(topk_ids: Tensor, num_experts: int) -> Load:
    """Counts of experts in topk_ids (T, k), of which -1 and what is no expert are dropped; all stay on the device."""
    ids = _ids(topk_ids).flatten()
    inside = (ids >= 0) & (ids < num_experts)
    counts = ids.new_zeros(num_experts + 1).scatter_add(0, torch.where(inside, ids, num_experts), torch.ones_like(ids))
    local = counts[:num_experts]
    fraction = local / local.sum().clamp(min=1)
    return Load(local, fraction, fraction.max() * num_experts, counts[num_experts])


def load_balancing_loss(logits: Tensor, topk_ids: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """E * sum over e of f[e] * P[e]: f the share of tokens that have expert e, which sums to k, P the mean of
    softmax(logits) over tokens.  It is k where all experts are alike.

    logits: (T, E)   topk_ids: (T, k)   mask: (T,), 0 for tokens of padding.   Returns a float32 scalar; its gradient
    goes through P.
    Source: Switch Transformer, equations 4 to 6, as `load_balancing_loss_func` of Mixtral in transformers.
    """
    tokens, experts = _rows(logits)
    ids = _ids(topk_ids)
    p = torch.softmax(logits, -1, dtype=torch.float32)
    counted = p.new_ones(tokens) if mask is None else mask.to(torch.float32)
    if tuple(counted.shape) != (tokens,) or ids.shape[0] != tokens:
        raise InputError(
            f"load_balancing_loss: logits is {tuple(logits.shape)}, topk_ids {tuple(ids.shape)}, mask "
            f"{tuple(counted.shape)}; they must agree in T."
        )
    inside = (ids >= 0) & (ids < experts)
    used = p.new_zeros(experts + 1).scatter_add(
        0, torch.where(inside, ids, experts).flatten(), counted[:, None].expand(ids.shape).flatten()
    )
    total = counted.sum()
    return experts * ((used[:experts] / total) * ((p * counted[:, None]).sum(0) / total)).sum()


def router_z_loss(logits: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The mean over tokens of logsumexp(logits)^2, which keeps logits small.   logits: (T, E)   mask: (T,)

    Source: Zoph et al., "ST-MoE: Designing Stable and Transferable Sparse Expert Models", 2022, equation 5.
    """
    _rows(logits)
    z = torch.logsumexp(logits.to(torch.float32), -1).square()
    return z.mean() if mask is None else (z * mask).sum() / mask.sum()


def switch(logits: Tensor, *, capacity: int | None = None) -> tuple[Tensor, Tensor]:
    """(weights, ids), (T, 1) each: the best expert of each token, with its probability.

    capacity: tokens that an expert takes, the first in their order; the ids of others are -1.
    Source: Fedus et al., "Switch Transformers", 2021.
    """
    _, experts = _rows(logits)
    p = torch.softmax(logits, -1, dtype=torch.float32)
    ids = largest(p.detach(), 1)
    weights = p.gather(1, ids)
    if capacity is not None:
        before = torch.nn.functional.one_hot(ids[:, 0], experts).cumsum(0).gather(1, ids)
        ids = torch.where(before <= capacity, ids, -1)
    return weights, ids


def expert_choice(logits: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """(weights, tokens), (E, capacity) each: every expert takes the tokens that like it most, so all have as many.

    weights: softmax over the experts of a token, fp32; tokens: int64, the best first, equals by the lower token.
    `ids_of_choice` turns them into ids for `fused_moe`.
    Source: Zhou et al., "Mixture-of-Experts with Expert Choice Routing", 2022.
    """
    count, _ = _rows(logits)
    if not 1 <= capacity <= count:
        raise InputError(f"expert_choice: capacity is {capacity}; {count} tokens allow 1 to {count}.")
    p = torch.softmax(logits, -1, dtype=torch.float32).mT
    tokens = largest(p.detach(), capacity)
    return p.gather(1, tokens), tokens


def ids_of_choice(weights: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(weights, ids), (T, E) each, of an `expert_choice`: expert e in column e, with id -1 where it did not choose the
    token.   count: T
    """
    experts = tokens.shape[0]
    spread = weights.new_zeros(experts, count).scatter(1, tokens, weights)
    chosen = torch.zeros_like(spread, dtype=torch.bool).scatter(1, tokens, True)
    ids = torch.where(chosen, torch.arange(experts, device=tokens.device)[:, None], -1)
    return spread.mT.contiguous(), ids.mT.contiguous()


def hashed(token_ids: Tensor, num_experts: int, k: int = 1) -> tuple[Tensor, Tensor]:
    """(weights, ids), (T, k) each: experts by the token's id alone, k neighbours from a multiplicative hash on, with
    weights 1 / k.   token_ids: (T,) integers.

    Source: Roller et al., "Hash Layers For Large Sparse Models", 2021.
    """
    if not 1 <= k <= num_experts:
        raise InputError(f"hashed: k is {k}; {num_experts} experts allow 1 to {num_experts}.")
    first = (token_ids.to(torch.int64) * 2654435761 % (1 << 32)) * num_experts >> 32
    ids = (first[:, None] + torch.arange(k, device=token_ids.device)) % num_experts
    return torch.full(ids.shape, 1 / k, device=ids.device), ids


def _rows(logits: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise InputError(f"router logits are {tuple(logits.shape)} {logits.dtype}; needs (T, E) of floating point.")
    return logits.shape[0], logits.shape[1]


def _ids(topk_ids: Tensor) -> Tensor:
    if topk_ids.dim() != 2 or topk_ids.dtype not in (torch.int32, torch.int64):
        raise InputError(f"topk_ids is {tuple(topk_ids.shape)} {topk_ids.dtype}; needs (T, k) int32 or int64.")
    return topk_ids.to(torch.int64)
