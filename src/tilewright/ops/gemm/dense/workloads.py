"""What the bench measures: layers of real models at the row counts of decoding, chunked prefill and training.

`params` of a row: M, N and K of D (M, N) = op(A) @ op(B), N counting the columns of op(B), and where they differ from
the plain nt product: layout "nn" | "tn" | "tt", bias and c True, activation, out_dtype.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tilewright.dispatch import Workload

ROWS = (1, 8, 16, 64, 128, 512, 4096, 8192)
DECODE_ROWS = (1, 8, 16, 64)

# (N, K) of DeepSeek-V3's layers as DeepGEMM's own benchmark lists them.
DEEPSEEK_V3 = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
DEEPSEEK_V3_LM_HEAD = (129280, 7168)
DEEPSEEK_V3_ROUTER = (256, 7168)

LLAMA_8B = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "up": (14336, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
LLAMA_8B_ROWS = (*ROWS[:-2], 2048, *ROWS[-2:])
LLAMA_8B_LM_HEAD = (128256, 4096)

SQUARES = (1024, 2048, 4096, 8192, 16384)


def _row(
    name: str, m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, into: str | None = None, **options: Any
) -> Workload:
    return Workload(name, {"M": m, "N": n, "K": k, **options}, (dtype,), ("fwd",), into)


def _layer(name: str, n: int, k: int, rows: Iterable[int] = ROWS, **options: Any) -> Iterable[Workload]:
    return (_row(f"{name}_m{m}", m, n, k, **options) for m in rows)


_FORWARD = (
    *(row for n, k in DEEPSEEK_V3 for row in _layer(f"dsv3_{n}x{k}", n, k)),
    *_layer("dsv3_lm_head", *DEEPSEEK_V3_LM_HEAD, rows=DECODE_ROWS, out_dtype=torch.float32),
    *_layer("dsv3_router", *DEEPSEEK_V3_ROUTER, rows=(1, 16), out_dtype=torch.float32),
    *(row for name, (n, k) in LLAMA_8B.items() for row in _layer(f"llama8b_{name}", n, k, rows=LLAMA_8B_ROWS)),
    *_layer("llama8b_lm_head", *LLAMA_8B_LM_HEAD, rows=(*DECODE_ROWS, 4096)),
    *(_row(f"square_{size}", size, size, size) for size in SQUARES),
)

_EPILOGUES = (
    *_layer("llama8b_gate_up_swiglu", *LLAMA_8B["gate_up"], rows=(1, 64, 2048, 4096), activation="swiglu"),
    _row("gpt_up_bias_gelu_m4096", 4096, 16384, 4096, bias=True, activation="gelu"),
)

# 4096 tokens.  The gradient of x (tokens, K) is dy (tokens, N) @ w (N, K); of w, dy.T @ x, summed in float32 over the
# micro-batches of a step.
_TOKENS = 4096
_BACKWARD = tuple(
    row
    for name in ("qkv", "down")
    for n, k in (LLAMA_8B[name],)
    for row in (
        _row(f"llama8b_{name}_dgrad", _TOKENS, k, n, layout="nn"),
        _row(f"llama8b_{name}_wgrad", n, k, _TOKENS, layout="tn", c=True, into="c", out_dtype=torch.float32),
    )
)

_FP8 = tuple(
    _row(f"fp8_{m}x{n}x{k}", m, n, k, torch.float8_e4m3fn, out_dtype=torch.bfloat16)
    for m, n, k in ((4096, 4096, 7168), (4096, 7168, 16384))
)

WORKLOADS = (*_FORWARD, *_EPILOGUES, *_BACKWARD, *_FP8)
CPU_WORKLOADS = (_row("small", 64, 512, 512),)

# The rows on which torch.compile's autotuner competes: it takes longer for one of them than everybody else for ten.
AUTOTUNED = frozenset(
    {
        "dsv3_2112x7168_m1",
        "dsv3_4096x7168_m1",
        "dsv3_4096x7168_m64",
        "dsv3_4096x7168_m4096",
        "dsv3_7168x16384_m1",
        "llama8b_qkv_m8",
        "llama8b_qkv_m4096",
        "llama8b_down_m64",
        "llama8b_gate_up_m8192",
        "llama8b_gate_up_swiglu_m4096",
        "square_4096",
        "square_8192",
    }
)
