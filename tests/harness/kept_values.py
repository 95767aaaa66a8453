"""Everything the library keeps on a device between calls, by the name its `DeviceCache` has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright import mask
from tilewright.models.attention.carrier import CarriedMask, VisibleKeys
from tilewright.nn import FP8Linear

Use = Callable[[], Tensor]
"""One call: a copy of the kept value, made if need be, on the current stream."""


def _program() -> Use:
    ids = torch.arange(4096, device="cuda") // 100
    made = (mask.document(ids) | mask.prefix(torch.tensor([70], device="cuda"))) & mask.window(512)
    return lambda: made.program("cuda")[1].clone()


def _fitted_program() -> Use:
    made = mask.document(cu_seqlens=torch.arange(0, 4097, 128, device="cuda"), length=4096)
    return lambda: (made & mask.causal()).fitted_program(4000, 4096, torch.device("cuda"))[1].clone()


def _runs() -> Use:
    made = mask.document(torch.arange(8192, device="cuda").view(2, 4096) // 100, contiguous=True)
    return lambda: (made & mask.causal()).fitted_program(4000, 4096, torch.device("cuda"))[1].clone()


def _cast() -> Use:
    g = torch.Generator("cuda").manual_seed(0)
    layer = FP8Linear(512, 512, dtype=torch.bfloat16, device="cuda").eval().requires_grad_(False)
    layer.weight.normal_(generator=g)
    return lambda: torch.cat([t.flatten().view(torch.uint8) for t in layer.cast_weight()])


def _elements() -> Use:
    made = CarriedMask(VisibleKeys(mask.causal() & mask.window(100), 512), (1, 512, 512), torch.device("cuda"))
    return lambda: made.elements.clone()


CASES: dict[str, list[Callable[[], Any]]] = {
    "programs of masks": [_program, _fitted_program, _runs],
    "float8 weights": [_cast],
    "elements of masks": [_elements],
}
