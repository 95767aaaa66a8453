"""Random caches, tables and lengths for the contracts of this family."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.ops import rows
from tilewright.ops.quant.numbers import E4M3

GARBAGE = 2147480000
"""An entry of a block_table that must not be read as a page."""


EDGE_GRID: Mapping[str, Any] = {
    "page_size": (1, 3, 16, 64),
    "lengths": ([1], [63, 64, 65], [0, 1, 130], [15, 16, 17, 1], [33] * 9),
    "new": lambda params: [
        1,
        list(params["lengths"]),
        [n // 2 for n in params["lengths"]],
        [min(n, 1) for n in params["lengths"]],
    ],
}
"""Values of the sizes of sequences for the grid of edge sizes."""


class Problem(NamedTuple):
    """Caches and sequences, with scales for e4m3 caches."""

    k_cache: Tensor
    v_cache: Tensor
    lengths: Tensor
    new: list[int]  # new tokens of each sequence
    options: dict[str, Tensor]  # block_table, cu_seqlens, k_scale, v_scale


def problem(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Problem:
    """params: lengths (a list), new (a list, or one number for all without cu_seqlens), H_kv, D, optional D_v,
    page_size (None: contiguous), capacity, padding (tokens behind cu_seqlens), scales ("head", "token"), heads_first.

    Pages are permuted, some pages belong to no sequence, and entries behind a length are garbage.
    """
    rng = rows.generator(seed)
    lengths, new = list(params["lengths"]), params["new"]
    page_size, h = params.get("page_size"), params["H_kv"]
    capacity = max([1, params.get("capacity", 0), *lengths])
    options: dict[str, Tensor] = {}
    if page_size is None:
        pages, size = len(lengths), capacity
    else:
        counts, size = [-(-n // page_size) for n in lengths], page_size
        pages = sum(counts) + sum(counts) // 7 + 1
        options["block_table"] = _table(counts, -(-capacity // page_size), pages, rng).to(device)
    if isinstance(new, Sequence):
        bounds = torch.tensor([0, *new]).cumsum(0)
        options["cu_seqlens"] = bounds.to(device=device, dtype=torch.int32)
    else:
        new = [new] * len(lengths)
    scales = params.get("scales")
    k_cache, v_cache = (
        _cache((pages, size, h, d), E4M3 if scales else dtype, device, rng, params.get("heads_first", False))
        for d in (params["D"], params.get("D_v", params["D"]))
    )
    if scales:
        shape = (h,) if scales == "head" else (pages, size, h)
        for name in ("k_scale", "v_scale"):
            options[name] = (torch.rand(shape, generator=rng) * 0.01 + 0.002).to(device)
    return Problem(k_cache, v_cache, torch.tensor(lengths, dtype=torch.int32, device=device), new, options)


def tokens_of(params: Mapping[str, Any], each: Sequence[int]) -> int:
    """T: the new tokens, and padding behind them."""
    return sum(each) + int(params.get("padding", 0))


def replaced(name: str, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    """Replace one argument."""

    def apply(arguments: dict[str, Any]) -> None:
        arguments[name] = change(arguments[name])

    return apply


def _table(counts: Sequence[int], width: int, pages: int, rng: torch.Generator) -> Tensor:
    table = torch.full((len(counts), max(width, *counts, 1)), GARBAGE, dtype=torch.int32)
    order = torch.randperm(pages, generator=rng).to(torch.int32)
    start = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[start : start + count]
        start += count
    return table


def _cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, rng: torch.Generator, heads_first: bool
) -> Tensor:
    pages, size, h, d = shape
    if heads_first:  # (pages, H_kv, page_size, D) in memory
        return rows.random_tensor((pages, h, size, d), torch.float32, device, rng).to(dtype).transpose(1, 2)
    return rows.random_tensor(shape, torch.float32 if dtype == E4M3 else dtype, device, rng).to(dtype)
