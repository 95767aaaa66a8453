"""Problems of `linear_cross_entropy`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows

_OPTIONS = ("label_smoothing", "z_loss", "softcap", "reduction", "ignore_index", "chunk_rows")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, N classes, K columns of hidden; bias, class_weight, ignored (part of the rows), batch,
    index_dtype, the options.
    """
    m, n, k, g = params["M"], params["N"], params["K"], rows.generator(seed + 1)
    shape = (params["batch"], m) if "batch" in params else (m,)
    hidden = rows.random_tensor((*shape, k), dtype, device, rows.generator(seed))
    weight = rows.random_tensor((n, k), dtype, device, g, 2.0 * k**-0.5)
    target = torch.randint(0, max(1, n), shape, generator=g)  # without classes no target is right
    target[torch.rand(shape, generator=g) < params.get("ignored", 0.0)] = params.get("ignore_index", -100)
    kwargs = {name: params[name] for name in _OPTIONS if name in params}
    if params.get("bias"):
        kwargs["bias"] = rows.random_tensor((n,), dtype, device, g)
    if params.get("class_weight"):
        kwargs["class_weight"] = (0.5 + torch.rand((n,), generator=g)).to(device)
    return Sample((hidden, weight, target.to(device, params.get("index_dtype", torch.int64))), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """One product forward, two for its gradients; logits are read and written in neither, at best."""
    hidden, weight, target = sample.args
    product = 2 * hidden.numel() * weight.shape[0]
    read = rows.nbytes(hidden, weight, target, *sample.kwargs.values())
    if direction == "fwd":
        return Cost(product, read, 8 * target.numel())
    return Cost(2 * product, read, rows.nbytes(hidden, weight))


_LLAMA = {"N": 128256, "K": 4096}
WORKLOADS = (  # the backward of a mean only returns what the forward has computed, so that of rows is timed
    *(Workload(f"llama3_8b_{m}", {"M": m, **_LLAMA}, directions=("fwd",)) for m in (1024, 4096, 8192)),
    Workload("llama3_8b_rows", {"M": 4096, **_LLAMA, "reduction": "none"}),
)
CPU_WORKLOADS = (Workload("small", {"M": 64, "N": 1024, "K": 128, "reduction": "none"}, (torch.float32,)),)

_ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "class_weight": True, "ignored": 0.3, "bias": True}
_SMALL = {"M": 9, "N": 40, "K": 24}
EDGE_CASES = (
    Workload("one_row: a single row", {"M": 1, "N": 64, "K": 32}),
    Workload("one_chunk: all logits fit", _SMALL),
    Workload("chunks: the last one is shorter", {**_SMALL, "chunk_rows": 4}),
    Workload("odd: no size is a multiple of anything", {"M": 7, "N": 51, "K": 13, "chunk_rows": 3}),
    Workload("ignored: rows without loss", {**_SMALL, "ignored": 0.5, "chunk_rows": 5}),
    Workload("bias: of the layer", {**_SMALL, "bias": True, "chunk_rows": 4}),
    Workload("all: every option, mean", {**_SMALL, **_ALL, "chunk_rows": 4}),
    Workload("all_sum: every option, sum", {**_SMALL, **_ALL, "reduction": "sum"}),
    Workload("all_none: a loss for each row", {**_SMALL, **_ALL, "reduction": "none", "chunk_rows": 4}),
    Workload("batch: more dimensions", {**_SMALL, "batch": 2, "reduction": "none"}),
    Workload("int32: targets of 32 bits", {**_SMALL, "index_dtype": torch.int32}),
    Workload("empty: no rows", {"M": 0, "N": 40, "K": 24, "reduction": "sum"}),
)


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        arguments: dict[str, Any] = {
            "hidden": torch.ones(4, 8), "weight": torch.ones(6, 8), "target": torch.zeros(4).long(), **changes
        }  # fmt: skip
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        return Sample((moved.pop("hidden"), moved.pop("weight"), moved.pop("target")), moved)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("mixed dtypes", "weight is torch.bfloat16, hidden is torch.float32", weight=torch.ones(6, 8).bfloat16()),
    _bad("weight of other columns", r"weight is \(6, 7\); needs \(V, 8\)", weight=torch.ones(6, 7)),
    _bad("a bias of columns", r"bias is \(8,\); needs \(6,\)", bias=torch.ones(8)),
    _bad("too few targets", r"target is \(3,\); needs \(4,\)", target=torch.zeros(3, dtype=torch.int64)),
    _bad("a reduction of batches", "reduction is 'batchmean'", reduction="batchmean"),
    _bad("class weights of rows", r"weight is \(4,\)", class_weight=torch.ones(4)),
    _bad("no rows in a chunk", "chunk_rows is 0; needs 1 or more", chunk_rows=0),
)
