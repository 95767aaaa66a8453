"""Other GEMMs: cuBLAS and cuBLASLt as torch calls them, torch.compile's autotuner, quack and DeepGEMM.

The reference is cuBLAS already, so eager torch and torch.compile in its default mode would be the same kernel twice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.dispatch import Sample
from tilewright.ops.gemm.dense.workloads import AUTOTUNED
from tilewright.ops.gemm.operands import LAYOUTS, layout_code
from tilewright.ops.peer import Call, LibraryPeer

REPLACES = {"cuda": ("eager", "compile")}


@dataclass(frozen=True)
class GpuPeer(LibraryPeer):
    """A library for GPUs alone."""

    devices: tuple[str, ...] = ("cuda",)


class Problem(NamedTuple):
    """The arguments of one call, operands as (M, K) and (K, N) views."""

    a: Tensor
    b: Tensor
    bias: Tensor | None
    c: Tensor | None
    alpha: float | Tensor
    activation: str | None
    out_dtype: torch.dtype

    @classmethod
    def of(cls, sample: Sample) -> "Problem":
        """Returns the problem of a sample of `matmul` or `bmm`."""
        a, b, *_ = sample.args
        options = sample.kwargs
        fp8 = a.dtype == torch.float8_e4m3fn
        return cls(
            a.mT if options.get("trans_a") else a,
            b.mT if options.get("trans_b") else b,
            options.get("bias"),
            options.get("c"),
            options.get("alpha", 1.0),
            options.get("activation"),
            options.get("out_dtype") or (torch.bfloat16 if fp8 else a.dtype),
        )

    @property
    def plain(self) -> bool:
        """Whether it is a product without an epilogue; the result may have another dtype."""
        scaled = isinstance(self.alpha, Tensor) or self.alpha != 1.0
        return self.bias is None and self.c is None and not self.activation and not scaled


def eager(z: Tensor, c: Tensor | None, activation: str | None) -> Tensor:
    """Computes the epilogue by torch's own ops, each of which rounds to z's dtype."""
    if activation == "relu":
        z = F.relu(z)
    elif activation == "gelu":
        z = F.gelu(z, approximate="tanh")
    elif activation == "silu":
        z = F.silu(z)
    elif activation == "swiglu":
        z = F.silu(z[..., 0::2]) * z[..., 1::2]
    return z if c is None else z + c


def _cublas(sample: Sample) -> Call | None:
    p = Problem.of(sample)
    if p.a.dtype == torch.float8_e4m3fn:
        return _scaled(p)
    if isinstance(p.alpha, Tensor) or p.alpha != 1.0:
        return None
    if p.a.dtype != p.out_dtype:
        return _widening(p)
    if p.plain:
        return lambda: torch.mm(p.a, p.b)
    if p.bias is None:
        return lambda: eager(torch.mm(p.a, p.b), p.c, p.activation)
    bias = p.bias
    return lambda: eager(torch.addmm(bias, p.a, p.b), p.c, p.activation)


def _widening(p: Problem) -> Call | None:
    """16-bit operands, float32 result; with `c` a weight gradient accumulated in place, as training frameworks do."""
    options: dict[str, Any] = {"out_dtype": p.out_dtype}
    if p.plain:
        return lambda: torch.mm(p.a, p.b, **options)
    c = p.c
    if c is None or p.bias is not None or p.activation or c.dtype != p.out_dtype:
        return None
    return lambda: torch.addmm(c, p.a, p.b, out=c, **options)


def _scaled(p: Problem) -> Call | None:
    """Per-tensor scales; their product is `alpha`."""
    if p.c is not None or p.activation:
        return None
    alpha = p.alpha if isinstance(p.alpha, Tensor) else torch.tensor(float(p.alpha), device=p.a.device)
    one = torch.ones_like(alpha)
    return lambda: torch._scaled_mm(p.a, p.b, alpha, one, p.bias, out_dtype=p.out_dtype, use_fast_accum=True)


def _quack(sample: Sample) -> Call | None:
    from quack.gemm_interface import gemm

    p = Problem.of(sample)
    if p.c is not None or p.activation or p.a.dtype == torch.float8_e4m3fn:
        return None
    return lambda: gemm(p.a, p.b, bias=p.bias, alpha=p.alpha, out_dtype=p.out_dtype)


def _deep_gemm(sample: Sample) -> Call | None:
    p = Problem.of(sample)
    if not p.plain or p.a.dtype != torch.bfloat16 or p.out_dtype == torch.float16:
        return None
    layout = LAYOUTS[layout_code(p.a, p.b)]
    a, b = (p.a.mT if layout[0] == "t" else p.a), (p.b.mT if layout[1] == "t" else p.b)
    multiply = getattr(import_module("deep_gemm"), f"bf16_gemm_{layout}")

    def call() -> Tensor:
        d = torch.empty(p.a.shape[0], p.b.shape[1], dtype=p.out_dtype, device=a.device)
        multiply(a, b, d)
        return d

    return call


class Autotuned:
    """torch.compile of the eager composition, its GEMM the fastest of cuBLAS's and Inductor's Triton templates."""

    name = "torch_compile"
    devices = ("cuda",)
    cases = AUTOTUNED

    def __init__(self) -> None:
        self._signature: object = None

    def available(self) -> bool:
        """Inductor needs Triton."""
        return find_spec("triton") is not None

    def make(self, sample: Sample) -> Call | None:
        """Compiled for these very sizes at the first call; later calls of one signature share the code."""
        p = Problem.of(sample)
        if p.a.dtype != p.out_dtype or isinstance(p.alpha, Tensor) or p.alpha != 1.0:
            return None
        signature = [(t.shape, t.stride(), t.dtype) for t in (p.a, p.b)], p.activation
        if signature != self._signature:
            torch.compiler.reset()  # past its recompile limit dynamo would refuse
            self._signature = signature
        compiled: Callable[..., Tensor] = torch.compile(
            _composed, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs"
        )
        return lambda: compiled(p.a, p.b, p.bias, p.c, p.activation)


def _composed(a: Tensor, b: Tensor, bias: Tensor | None, c: Tensor | None, activation: str | None) -> Tensor:
    return eager(a @ b if bias is None else torch.addmm(bias, a, b), c, activation)


PEERS = (
    GpuPeer("cublas", None, _cublas),
    Autotuned(),
    GpuPeer("quack", "quack", _quack),
    GpuPeer("deep_gemm", "deep_gemm", _deep_gemm),
)
