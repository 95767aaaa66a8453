"""Shared by the ops after the router: experts of tokens, the order that `moe_align` makes, checks and samples."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch.derivatives import level_is_open
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.kvcache.checks import may_read

IDS = (torch.int32, torch.int64)


def local_experts(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Experts of this device as int64; num_experts for what is dropped."""
    experts = topk_ids.to(torch.int64)
    if expert_map is not None:
        mapped = (experts >= 0) & (experts < expert_map.shape[0])
        experts = torch.where(mapped, expert_map.to(torch.int64)[torch.where(mapped, experts, 0)], -1)
    return torch.where((experts >= 0) & (experts < num_experts), experts, num_experts)


def check_experts(op: str, topk_ids: object, expert_map: object, num_experts: Any) -> None:
    """Raise InputError unless these are ids (T, k), an optional map and a number of experts; where the ids may be read,
    also unless they are experts.
    """
    if not isinstance(topk_ids, Tensor) or topk_ids.dtype not in IDS or topk_ids.dim() != 2:
        got = f"{tuple(topk_ids.shape)} {topk_ids.dtype}" if isinstance(topk_ids, Tensor) else type(topk_ids).__name__
        raise InputError(f"{op}: topk_ids is {got}; needs (T, k) of torch.int32 or torch.int64.")
    if not isinstance(num_experts, (int, torch.SymInt)) or isinstance(num_experts, bool) or num_experts < 1:
        raise InputError(f"{op}: num_experts is {num_experts!r}; needs the number of experts, at least 1.")
    count = num_experts
    if expert_map is not None:
        if not isinstance(expert_map, Tensor) or expert_map.dtype != torch.int32 or expert_map.dim() != 1:
            got = f"{tuple(expert_map.shape)} {expert_map.dtype}" if isinstance(expert_map, Tensor) else "no tensor"
            raise InputError(f"{op}: expert_map is {got}; needs (all experts,) torch.int32.")
        if expert_map.device != topk_ids.device:
            raise InputError(f"{op}: expert_map is on {expert_map.device}, topk_ids on {topk_ids.device}.")
        count = expert_map.shape[0]
    if topk_ids.numel() and not level_is_open() and may_read(topk_ids):
        least, most = (int(v) for v in topk_ids.aminmax())
        if least < -1 or most >= count:
            raise InputError(f"{op}: topk_ids has {least if least < -1 else most}; needs -1 (dropped) to {count - 1}.")


def check_order(op: str, slots: object, positions: object, device: torch.device) -> None:
    """Raise InputError unless these are slots (T * k,) and positions (T, k), int32, as `moe_align` makes them."""
    for name, t, dims in (("slots", slots, 1), ("positions", positions, 2)):
        if not isinstance(t, Tensor) or t.dtype != torch.int32 or t.dim() != dims:
            got = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
            form = "(T * k,)" if dims == 1 else "(T, k)"
            raise InputError(f"{op}: {name} is {got}; needs {form} torch.int32, as moe_align makes it.")
        if t.device != device:
            raise InputError(f"{op}: {name} is on {t.device}, the first tensor on {device}. Move them to one device.")
    assert isinstance(slots, Tensor)
    assert isinstance(positions, Tensor)
    if slots.shape[0] != positions.numel():
        raise InputError(f"{op}: slots has {slots.shape[0]} and positions {tuple(positions.shape)}; they must agree.")


def random_ids(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """(M, K) different experts a token of E: chosen (the first so many alone), dropped (some are -1), again (experts
    may repeat).
    """
    m, k, experts = params["M"], params["K"], params.get("chosen", params["E"])
    g = rows.generator(seed)
    if params.get("again"):
        ids = torch.randint(experts, (m, k), generator=g)
    else:
        ids = torch.rand((m, experts), generator=g).argsort(1)[:, : min(k, experts)]
    if params.get("dropped"):
        ids = torch.where(torch.rand(ids.shape, generator=g) < 0.3, -1, ids)
    return ids.to(dtype).contiguous().to(device)


def order_of(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(slots, positions) in plain torch, for samples."""
    experts = local_experts(ids, None, num_experts).flatten()
    slots = experts.sort(stable=True).indices
    positions = torch.empty_like(slots).scatter(0, slots, torch.arange(slots.shape[0], device=ids.device))
    positions = torch.where(experts < num_experts, positions, -1).view(ids.shape)
    return slots.to(torch.int32), positions.to(torch.int32)
