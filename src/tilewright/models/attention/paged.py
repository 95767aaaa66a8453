"""Attention of transformers' continuous batching over its paged cache, where the keys lie.

    full attention   new keys and values go to their pages, then `fmha_paged` or `fmha_decode` reads the pages
    sliding window   the cache's own rolling buffer, gathered by the cache, then `fmha`
    nothing to read  every sequence is new, and its keys are in the call: they are stored, then `fmha`

Transformers names the slot of every key (`read_index`), and pages only in its decode path (`block_table`).  Pages are
computed from the slots on the device, once a step: layers of one group share them, as they share masks.  Shapes depend
on shapes alone and nothing is read on the host, so all of it runs in the CUDA graphs of transformers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewright.errors import InputError
from tilewright.mask import Mask
from tilewright.mask import sequences as sequences_mask
from tilewright.models.attention.refused import refuse
from tilewright.models.transformers_names import PagedLayer, paged_layer
from tilewright.ops.attention.fmha import fmha
from tilewright.ops.attention.fmha_decode import fmha_decode
from tilewright.ops.attention.fmha_paged import fmha_paged
from tilewright.ops.kvcache.kv_append_ import kv_append_

PREFIX = "paged|"
_STEPS = "_tilewright_steps"  # attribute of the cache: what the last step computed for each group of layers


class Step(NamedTuple):
    """What the layers of a group share in one forward pass: pages, or the mask of keys that are gathered."""

    read_index: Tensor  # the very tensor of this pass
    lengths: Tensor | None = None  # (B,) int32, new tokens included
    block_table: Tensor | None = None  # (B, max_pages) int32
    mask: Mask | None = None


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    backend: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as continuous batching expects it of "paged|..." names, and store the new keys and values in `cache`.

    query: (1, H, T, D)   key, value: (1, H_kv, T, D), new tokens of all sequences end to end.   attention_mask: not
    read, causality and windows follow from `cu_seq_lens_q` and `cu_seq_lens_k`.   s_aux: (H,) sinks.
    Returns (1, T, H, D) and None; 0 for padding behind the last sequence.
    Raises InputError without a cache and for what `register_attention` lists.
    """
    if cache is None:
        raise InputError(
            'attention: "paged|tilewright" without a paged cache, which continuous batching alone passes: use '
            'generate_batch or init_continuous_batching. Elsewhere set_attn_implementation("tilewright").'
        )
    refuse(kwargs)
    if dropout:
        raise InputError(f"attention: dropout is {dropout}; a paged cache is for inference. Call model.eval().")
    layer_idx: Any = module.layer_idx
    layer = paged_layer(cache, layer_idx)
    step = _step(cache, layer, query.shape[2], kwargs)
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap or None, "sinks": s_aux, "backend": backend}
    if step.mask is not None:
        read_index, write_index = kwargs["read_index"], kwargs["write_index"]
        k, v = cache.update(key, value, layer_idx, read_index, write_index)
        o = fmha(query.transpose(1, 2), k[None], v[None], mask=step.mask, layout="BSHD", **options)
        assert isinstance(o, Tensor)
        return o, None
    return _attend_pages(query, key, value, layer, step, kwargs, options)[None], None


def _attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: PagedLayer,
    step: Step,
    batch: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Store the new tokens, then attend over the pages: (T, H, D)."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    lengths, cu_seqlens = step.lengths, batch["cu_seq_lens_q"]
    assert layer.k_pages is not None
    assert layer.v_pages is not None
    assert lengths is not None
    # One new token each: in the decode path, and elsewhere where the longest is 1 and no token is padding
    if batch["max_seqlen_q"] == 1 and q.shape[0] == lengths.shape[0]:
        cu_seqlens = None
    kv_append_(
        layer.k_pages, layer.v_pages, k, v, lengths, block_table=step.block_table, cu_seqlens=cu_seqlens,
        backend=options["backend"],
    )  # fmt: skip
    pages = layer.k_pages, layer.v_pages
    if cu_seqlens is None:
        o = fmha_decode(q, *pages, lengths, block_table=step.block_table, **options)
    else:
        o = fmha_paged(q, *pages, cu_seqlens, lengths, block_table=step.block_table, **options)
    assert isinstance(o, Tensor)
    return o


def _step(cache: Any, layer: PagedLayer, tokens: int, batch: dict[str, Any]) -> Step:
    """What this pass needs for the layer's group: computed by its first layer, so that a CUDA graph holds it too."""
    if torch.compiler.is_compiling():  # a compiler finds what layers have in common, and would guard what is kept
        return _new_step(layer, tokens, batch)
    steps: dict[int, Step] | None = getattr(cache, _STEPS, None)
    if steps is None:
        steps = {}
        setattr(cache, _STEPS, steps)
    step = steps.get(layer.group)
    if step is None or layer.is_first or step.read_index is not batch["read_index"][layer.group]:
        step = steps[layer.group] = _new_step(layer, tokens, batch)
    return step


def _new_step(layer: PagedLayer, tokens: int, batch: dict[str, Any]) -> Step:
    """See `Step`."""
    read_index, block_table = batch["read_index"][layer.group], batch["block_table"]
    kind = "full_attention" if layer.window is None else "sliding_attention"
    cu_q, cu_k, longest = batch["cu_seq_lens_q"], batch["cu_seq_lens_k"], batch["max_seqlen_k"]
    if isinstance(cu_k, dict):
        cu_k, longest = cu_k[kind], longest[kind]
    is_empty = read_index.shape[0] == 0 and block_table is None
    if is_empty or layer.window is not None:
        window = None if layer.window is None else (layer.window - 1, 0)
        keys = tokens if is_empty else read_index.shape[0]
        cu_k = None if is_empty else cu_k  # new sequences: as many keys as queries
        return Step(
            read_index, mask=sequences_mask(cu_q, cu_k, length_q=tokens, length_k=keys, causal=True, window=window)
        )
    assert layer.k_pages is not None, "full attention has pages"
    table = pages_of(read_index, cu_k, longest, layer.k_pages.shape[1]) if block_table is None else block_table
    return Step(read_index, lengths=cu_k[1:] - cu_k[:-1], block_table=table if table.dim() == 2 else table[layer.group])


def pages_of(read_index: Tensor, cu_seqlens: Tensor, longest: int, page_size: int) -> Tensor:
    """The block table (B, ceil(longest / page_size)) int32 of sequences whose keys lie in these slots.

    read_index: (slots,) int64, those of all sequences end to end.   cu_seqlens: (B + 1,) int32, where each begins.
    Entries behind the last page of a sequence are of other sequences.
    """
    width = max(-(-longest // page_size), 1)
    first = torch.arange(0, width * page_size, page_size, dtype=torch.int32, device=cu_seqlens.device)
    places = (cu_seqlens[:-1, None] + first).clamp(max=read_index.shape[0] - 1)
    return (read_index[places] // page_size).to(torch.int32)
