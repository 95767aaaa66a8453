"""nn.Linear on `ops.matmul`, for those numbers of rows at which ours was measured faster than cuBLAS.

A linear layer is the one module whose torch form is already one tuned kernel, so it is replaced by evidence alone: the
tables must have a row for its (N, K) and dtype that another backend than torch won. Which product then runs is decided
call by call: a bucket of rows that was measured, and won, goes to `ops.matmul`; every other one stays with `F.linear`,
whose call is also several times cheaper on the host. So prefill may run on cuBLAS while decoding runs on our kernel.

`F.linear` keeps every call whose gradient is wanted (its backward would be products of other sizes, of which the table
was not asked), and what it defines by itself: autocast, vectors, mixed dtypes, tensor subclasses.
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
from tilewright.dispatch.measured import by_rows, measured_us
from tilewright.dispatch.preference import resolve
from tilewright.dispatch.registry import GENERATION
from tilewright.models.stand_in import Left, Match, Proposal, obstacle, probing, run_both, serving_device

_K, _N = 16, 24  # of the probe
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PLAIN = frozenset((Tensor, FakeTensor))

Faster = Callable[[Tensor, Tensor], bool]
"""(x (..., K), weight (N, K)): was a product of these sizes measured faster on our kernels than in torch's way?"""

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
    """x @ weight.T + bias: by `ops.matmul` where it was measured faster or is asked for, else by `F.linear`.

    x: (..., K)   weight: (N, K), any row stride   bias: (N,)   Returns (..., N).
    """
    if is_ours(x, weight, bias, backend, measured_faster):
        return ops.matmul(x, weight, trans_b=True, bias=bias, backend=backend)
    return F.linear(x, weight, bias)


def is_ours(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None, faster: Faster) -> bool:
    """Does this product run on `ops.matmul`?  `faster` is asked once a bucket of rows.

    A preference or a numerics mode in force is for `ops.matmul` to honour. `torch.compile` traces calls whose number of
    rows may be symbolic: there dispatch decides, once the graph is opened.
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
    key = (faster, GENERATION[0], (size // x.shape[-1] - 1).bit_length(), weight.shape, x.dtype, x.device)
    verdict = _verdicts.get(key)
    if verdict is None:
        verdict = _verdicts[key] = faster(x, weight)
    return verdict


def measured_faster(x: Tensor, weight: Tensor) -> bool:
    """Does `auto` have a row for this product that says ours, and can its kernel run here?"""
    return product_us(x, weight, "") is not None


def product_us(x: Tensor, weight: Tensor, activation: str) -> float | None:
    """Device time of act(x @ weight.T) on the kernel that `auto` chooses for it; None if torch's or an unmeasured one.

    Plans, and runs nothing.
    """
    args = (x.detach().flatten(0, -2), weight.detach().mT, None, None, None, 1.0, activation, x.dtype)
    plan = forward_op().plan(args, "auto", "default")
    return None if plan.backend == "torch" else measured_us(plan)


def forward_op() -> RawOp:
    """The raw op whose rows are asked for."""
    return contract("matmul").forward


def sizes(n: int, k: int, dtype: torch.dtype, *, gated: bool = False) -> tuple[int, ...]:
    """The bucket of x (M, K) @ weight (N, K).T without M: both row-major and aligned, the result in their dtype."""
    return n, k, 0, 1, 8 * dtype.itemsize, int(gated)


def won(n: int, k: int, dtype: torch.dtype, device: torch.device) -> dict[int, float]:
    """Microseconds that ours was measured faster than torch's product by, for each bucket of rows where it was."""
    rows = by_rows(forward_op(), sizes(n, k, dtype), dtype, device).items()
    return {m: (row.torch_us or row.us) - row.us for m, row in rows if row.backend != "torch"}


def saved_us(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> float:
    """What `linear` saves in a call of `m` rows, by the tables."""
    return won(n, k, dtype, device).get(row_bucket(m), 0.0)


def find(module: nn.Module, backend: str | None) -> Proposal | None:
    """The linear layer this module is; None for anything but an nn.Linear of plain floats, or where nothing is won."""
    if getattr(type(module), "forward", None) is not nn.Linear.forward:
        return None
    assert isinstance(module, nn.Linear)
    weight: Any = module.weight
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or weight.dtype not in _FLOATS:
        return None
    n, k = weight.shape
    buckets = won(n, k, weight.dtype, serving_device(weight.device))
    if not buckets:
        return None
    if reason := obstacle(module):
        raise Left("linear", reason)
    verdict = _reproduces(weight.dtype, weight.device, module.bias is not None)
    if verdict is None:
        raise Left("linear", "is not x @ weight.T + bias")
    rows = ", ".join(map(str, sorted(buckets)))
    return Proposal(
        "linear", LinearRecipe(backend), ("matmul",), f"ops.matmul, measured faster at M={rows} ({verdict})"
    )


@functools.cache
def _reproduces(dtype: torch.dtype, device: torch.device, bias: bool) -> Match | None:
    """One probe for all layers of a kind: `find` lets no other forward than torch's come here."""
    with probing(device):
        layer = nn.Linear(_K, _N, bias=bias, device=device, dtype=dtype)
        x = torch.randn(3, 5, _K, device=device, dtype=dtype)
        return run_both("linear", nn.Linear.forward, LinearRecipe("torch").build(nn.Linear), layer, x)
