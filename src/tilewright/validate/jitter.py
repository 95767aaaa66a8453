"""Jitter: random errors of one float32 rounding, in inputs and in the terms of every sum of a reference.

Where the terms of a sum cancel, their roundings are what is left.  An implementation may round any of them otherwise
than torch does.  Jitter of the inputs alone does not show it: in attention to a single key do @ v^T and sum(do * o) are
equal for all inputs, and differ by the rounding of each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SUMS = frozenset(
    ("add", "sub", "rsub", "sum", "mean", "cumsum", "mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "addcmul")
)
"""The ops of aten whose terms can cancel."""


def jittered(t: Tensor, noise: torch.Generator) -> Tensor:
    """`t` with random errors of up to one rounding of its dtype; infinities and zeros stay.   noise: of any device."""
    info = torch.finfo(t.dtype)
    steps = torch.empty(t.shape, dtype=t.dtype, device=noise.device).uniform_(
        -info.eps / 2, info.eps / 2, generator=noise
    )
    return torch.addcmul(t, t.clamp(-info.max / 4, info.max / 4), steps.to(t.device))


class JitteredTerms(TorchDispatchMode):
    """Inside the block every sum reads jittered copies of its terms in `dtype`.  Sums in place (`add_`) do not."""

    def __init__(self, dtype: torch.dtype, noise: torch.Generator) -> None:
        super().__init__()
        self.dtype = dtype
        self._seed = int(torch.randint(2**62, (), generator=noise, device=noise.device))
        self._generators: dict[torch.device, torch.Generator] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, torch's guard around each op of a mode: nothing is compiled here, and there are thousands."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket.__name__ in SUMS:
            args = [self._off(a) for a in args]
        return func(*args, **(kwargs or {}))

    def _off(self, v: Any) -> Any:
        if not isinstance(v, Tensor) or v.dtype != self.dtype or v.is_meta:  # torch's forward mode asks meta tensors
            return v
        noise = self._generators.get(v.device)
        if noise is None:
            noise = self._generators[v.device] = torch.Generator(v.device).manual_seed(self._seed)
        return jittered(v, noise)
