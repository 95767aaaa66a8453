"""What `fmha_varlen` refuses before anything is launched, in words."""

from typing import Any

import torch
from torch import Tensor

from tilewright.errors import InputError
from tilewright.ops.attention.score import Alibi, RelativeBias, Scores
from tilewright.ops.rows import FLOATS

OP = "fmha_varlen"


def check_tokens(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    """Tensors of tokens, and int32 boundaries of as many sequences of both."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise InputError(f"{OP}: {name} is a {type(t).__name__}; needs a torch.Tensor.")
        if t.dim() != 3:
            raise InputError(f"{OP}: {name} is {tuple(t.shape)}; needs (T, H, D), the tokens of all sequences.")
        if t.dtype not in FLOATS:
            raise InputError(f"{OP}: {name} is {t.dtype}; needs one of bfloat16, float16, float32. Cast it first.")
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as (T, H, D)"
    if k.shape[:2] != v.shape[:2]:
        raise InputError(f"{OP}: {shapes}; k and v must agree in T and H.")
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu is None and name == "cu_seqlens_k":
            continue
        if not isinstance(cu, Tensor):
            raise InputError(f"{OP}: {name} is a {type(cu).__name__}; needs a torch.Tensor.")
        if cu.dim() != 1 or cu.numel() < 1 or cu.dtype != torch.int32 or cu.device != q.device:
            raise InputError(
                f"{OP}: {name} is {tuple(cu.shape)} {cu.dtype} on {cu.device}; needs (sequences + 1,) int32 on "
                f"{q.device}."
            )
    if cu_seqlens_k is None and q.shape[0] != k.shape[0]:
        raise InputError(f"{OP}: {shapes}; other keys than queries need cu_seqlens_k.")
    if cu_seqlens_k is not None and cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise InputError(
            f"{OP}: cu_seqlens_q is {tuple(cu_seqlens_q.shape)}, cu_seqlens_k {tuple(cu_seqlens_k.shape)}; queries and "
            "keys have as many sequences."
        )


def check_distances(scores: Scores, cu_seqlens_k: Any) -> None:
    """Refuse distances if cu_seqlens_k is given: kernels count them in packed tokens, of queries and keys alike."""
    distant = scores.slopes is not None or any(isinstance(step, (Alibi, RelativeBias)) for step in scores.rest)
    if distant and cu_seqlens_k is not None:
        raise InputError(
            f"{OP}: alibi and relative_bias go with one cu_seqlens for queries and keys. Leave out cu_seqlens_k, or "
            "write the bias as a callable (score, b, h, q_idx, kv_idx) -> score."
        )
