"""Shared by the routers: the choice of k experts a token, the weights of the chosen, checks and samples."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch.bucket import hint
from tilewright.errors import InputError
from tilewright.ops import rows

MOST_EXPERTS = 4096
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class RouterBucket(NamedTuple):
    M: int  # rounded up to a power of two
    N: int
    K: int


def bucket(args: Any) -> RouterBucket:
    """The bucket of logits (T, E) and k."""
    return RouterBucket(*rows.rows_bucket(args.logits), hint(args.k))


def outputs(args: Any) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
    """Weights and ids, (T, k) each."""
    shape = (args.logits.shape[0], args.k)
    return (shape, rows.accumulate_dtype(args.logits.dtype)), (shape, torch.int64)


def largest(choice: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, the largest first, equals by the lower index; NaN is the largest."""
    keys = torch.where(choice.isnan(), torch.nan, choice)
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k].contiguous()


def check(op: str, logits: object, bias: object, k: int) -> None:
    """Raise InputError unless logits is (T, E), bias (E,) or None, and 1 <= k <= E."""
    if not isinstance(logits, Tensor):
        raise InputError(f"{op}: logits is a {type(logits).__name__}; needs a torch.Tensor (T, E).")
    if logits.dtype not in FLOATS:
        raise InputError(f"{op}: logits is {logits.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise InputError(f"{op}: logits is {tuple(logits.shape)}; needs (T, E) with at least one expert.")
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise InputError(f"{op}: k is {k}; logits is {tuple(logits.shape)}, needs 1 <= k <= {experts}.")
    if bias is None:
        return
    if not isinstance(bias, Tensor) or bias.dtype not in FLOATS or tuple(bias.shape) != (experts,):
        got = f"{tuple(bias.shape)} {bias.dtype}" if isinstance(bias, Tensor) else f"a {type(bias).__name__}"
        raise InputError(f"{op}: bias is {got}; needs ({experts},) of floating point, one number an expert.")
    if bias.device != logits.device:
        raise InputError(f"{op}: bias is on {bias.device}, logits on {logits.device}. Move them to one device.")


def random_logits(params: Any, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, Tensor | None]:
    """(logits, bias): params M tokens, N experts; optional equal (integers, of which many are alike), bias."""
    g = rows.generator(seed)
    logits = rows.random_tensor((params["M"], params["N"]), dtype, device, g, scale=params.get("spread", 1.5))
    if params.get("equal"):
        logits = logits.round()
    if not params.get("bias"):
        return logits, None
    # In steps of 1/64, so that the order of scores is the same in float32 and float64
    bias = (rows.random_tensor((params["N"],), torch.float32, torch.device("cpu"), g, scale=0.1) * 64).round() / 64
    return logits, bias.to(device)
