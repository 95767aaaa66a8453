"""nn.Linear on `ops.matmul`, for those numbers of rows at which ours was measured faster than cuBLAS.

In torch a linear layer is already one tuned kernel, so it is replaced only by evidence: the tables must have a row for
its (N, K) and dtype in which a backend other than torch won. Each call then chooses: a bucket of rows that was
measured and won goes to `ops.matmul`; every other one stays with `F.linear`, whose call is also several times cheaper
on the host. So prefill may run on cuBLAS while decoding runs on our kernel.

`F.linear` keeps every call that needs a gradient (the products of its backward have other sizes, which these rows do
not cover), and what it defines by itself: autocast, vectors, mixed dtypes, tensor subclasses.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tilewright import ops
from tilewright.dispatch import RawOp, contract
from tilewright.dispatch.bucket import row_bucket
from tilewright.dispatch.preference import resolve
from tilewright.dispatch.registry import GENERATION
from tilewright.dispatch.tables.measured import by_rows, measured_us
from tilewright.models.stand_in import (
    Match,
    NotReplaceable,
    Proposal,
    obstacle,
    probing,
    run_both,
    serving_device,
    takes_unmeasured,
)

_K, _N = 16, 24  # sizes of the probe
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = frozenset((Tensor, FakeTensor))

Faster = Callable[[Tensor, Tensor], bool]
"""(x (..., K), weight (N, K)) -> was a product of these sizes measured faster on our kernels than in torch?"""

_verdicts: dict[tuple[Any, ...], bool] = {}


@dataclass(frozen=True)
class LinearRecipe:
    """`linear` with the module's own weight and bias, read at every call."""

    backend: str | None

    def build(self, cls: type[nn.Module]) -> Callable[..., Any]:
        """forward(self, input) -> (..., N)."""
        backend = self.backend

        def forward(self: nn.Linear, input: Tensor) -> Tensor:
            return linear(input, self.weight, self.bias, backend)

        return forward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None = None) -> Tensor:
    """x @ weight.T + bias: by `ops.matmul` where it was measured faster or the caller prefers it, else by `F.linear`.

    x: (..., K)   weight: (N, K), any row stride   bias: (N,)   Returns (..., N).
    """
    if is_ours(x, weight, bias, backend, measured_faster):
        return ops.matmul(x, weight, trans_b=True, bias=bias, backend=backend)
    return F.linear(x, weight, bias)


def is_ours(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None, faster: Faster) -> bool:
    """True if this product runs on `ops.matmul`.  `faster` is called once for each bucket of rows.

    `ops.matmul` honours a preference or a numerics mode in force.  Under `torch.compile` the number of rows may be
    symbolic: `ops.matmul` is traced, and dispatch chooses when the graph runs.
    """
    if type(x) not in _PLAIN or x.dtype != weight.dtype or x.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        return False
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return False
    preference, numerics = resolve(backend)
    if preference == "torch":
        return False
    if preference != "auto" or numerics != "default" or torch.compiler.is_compiling():
        return True
    size = x.numel()
    if size == 0:
        return False
    if takes_unmeasured():
        return True
    key = (faster, GENERATION[0], (size // x.shape[-1] - 1).bit_length(), weight.shape, x.dtype, x.device)
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _verdicts[key] = faster(x, weight)
    return verdict


def measured_faster(x: Tensor, weight: Tensor) -> bool:
    """True if `auto` has a row for this product that one of our kernels won, and that kernel runs on this machine."""
    return product_us(x, weight, "") is not None


def product_us(x: Tensor, weight: Tensor, activation: str) -> float | None:
    """Device time of act(x @ weight.T) on the kernel that `auto` chooses; None if that is torch's or was not measured.

    Plans, and runs nothing.
    """
    args = (x.detach().flatten(0, -2), weight.detach().mT, None, None, None, 1.0, activation, x.dtype)
    plan = forward_op().plan(args, "auto", "default")
    return None if plan.backend == "torch" else measured_us(plan)


def forward_op() -> RawOp:
    """The raw op whose table rows this module reads."""
    return contract("matmul").forward


def sizes(n: int, k: int, dtype: torch.dtype, *, gated: bool = False) -> tuple[int, ...]:
    """The bucket of x (M, K) @ weight (N, K).T without M: both row-major and aligned, the result in their dtype."""
    return n, k, 0, 1, 8 * dtype.itemsize, int(gated)


def won(n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[int, float]:
    """Microseconds saved against torch's product, for each bucket of rows where ours was measured faster."""
    rows = by_rows(forward_op(), sizes(n, k, dtype), dtype, device).items()
    return {m: (row.torch_us or row.us) - row.us for m, row in rows if row.backend != "torch"}


def saved_us(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> float:
    """Microseconds that `linear` saves in a call of `m` rows, by the tables."""
    return won(n, k, dtype, device).get(row_bucket(m), 0.0)


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """Propose an nn.Linear of plain floats; None for other modules, or where no bucket of rows is faster."""
    if getattr(type(module), "forward", None) is not nn.Linear.forward:
        return None
    assert isinstance(module, nn.Linear)
    weight: Any = module.weight
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.dtype not in _FLOATS:
        return None
    n, k = weight.shape
    buckets = won(n, k, weight.dtype, serving_device(weight.device))
    if not buckets and not takes_unmeasured():
        return None
    if reason := obstacle(module):
        raise NotReplaceable("linear", reason)
    verdict = _reproduces(weight.dtype, weight.device, module.bias is not None)
    if verdict is None:
        raise NotReplaceable("linear", "is not x @ weight.T + bias")
    rows = ", ".join(map(str, sorted(buckets))) or "no number of rows yet"
    return Proposal(
        "linear", LinearRecipe(backend), ("matmul",), f"ops.matmul, measured faster at M={rows} ({verdict})"
    )


@functools.cache
def _reproduces(dtype: torch.dtype, device: torch.device, bias: bool) -> Match | None:
    """One probe serves all layers of a kind: `find` only passes modules with torch's own forward."""
    with probing(device):
        layer = nn.Linear(_K, _N, bias=bias, device=device, dtype=dtype)
        x = torch.randn(3, 5, _K, device=device, dtype=dtype)
        return run_both("linear", nn.Linear.forward, LinearRecipe("torch").build(nn.Linear), layer, x)
