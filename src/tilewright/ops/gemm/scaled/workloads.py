"""What the bench measures: the shapes of DeepGEMM's own benchmark, projections of an 8B model, and epilogues.

`params` as in `scaled_samples.inputs`; scales of 1x128 times 128x128 where none are named.  All are `binary`, so that
cuBLAS can be asked for the same product with one scale for each operand, an easier problem.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tilewright.dispatch import Workload

ROWS = (1, 8, 16, 64, 128, 512, 4096, 8192)

# (N, K) of DeepSeek-V3's layers as DeepGEMM's own benchmark lists them.
DEEPSEEK_V3 = ((2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048))
# (M, N) of its weight gradients; K counts tokens.
GRADIENTS = ((7168, 2112), (1536, 24576), (512, 32768), (16384, 7168), (7168, 4096), (2048, 7168))
TOKENS = (4096, 8192)

LLAMA_8B = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}

COARSE = ((4096, 4096, 7168), (4096, 7168, 16384), (8192, 8192, 8192))


def row(name: str, m: int, n: int, k: int, into: str | None = None, **options: Any) -> Workload:
    """A row of float8 operands, forward only."""
    return Workload(name, {"M": m, "N": n, "K": k, "binary": True, **options}, (torch.float8_e4m3fn,), ("fwd",), into)


def layer(name: str, n: int, k: int, rows: Iterable[int] = ROWS, **options: Any) -> tuple[Workload, ...]:
    """One weight, several numbers of rows."""
    return tuple(row(f"{name}_m{m}", m, n, k, **options) for m in rows)


# In float32, as DeepGEMM's recipe (1, 1, 128); what is added to is read too.  Torch adds in a separate pass, so the
# same without it is listed too.
_GRADIENT: dict[str, Any] = {"scaling": "token_token", "out_dtype": torch.float32}

WORKLOADS = (
    *(each for n, k in DEEPSEEK_V3 for each in layer(f"dsv3_{n}x{k}", n, k)),
    *(row(f"wgrad_{m}x{n}x{k}", m, n, k, into="c", c=True, **_GRADIENT) for m, n in GRADIENTS for k in TOKENS),
    *(row(f"wgrad_{m}x{n}x{k}_alone", m, n, k, **_GRADIENT) for m, n in GRADIENTS for k in TOKENS),
    *(row(f"{s}_{m}x{n}x{k}", m, n, k, scaling=s) for s in ("tensor", "row") for m, n, k in COARSE),
    *(each for name, (n, k) in LLAMA_8B.items() for each in layer(f"llama8b_{name}", n, k, (1, 16, 4096))),
    row("bias_m4096", 4096, 4096, 7168, bias=True),
    *layer("llama8b_gate_up_swiglu", *LLAMA_8B["gate_up"], (1, 64, 4096), activation="swiglu"),
)
CPU_WORKLOADS = (Workload("small", {"M": 64, "N": 512, "K": 512}, directions=("fwd",)),)
