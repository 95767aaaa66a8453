"""Problems of `linear_jsd`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows

_OPTIONS = ("beta", "temperature", "hard_weight", "reduction", "ignore_index", "kind", "chunk_rows")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, N classes, K columns of hidden and optional K_t of the teacher; bias (both), ignored (part of the
    rows), batch, the options.
    """
    m, n, k, g = params["M"], params["N"], params["K"], rows.generator(seed + 1)
    shape, k_t = (params["batch"], m) if "batch" in params else (m,), params.get("K_t", k)
    hidden, teacher = (rows.random_tensor((*shape, c), dtype, device, rows.generator(seed + c)) for c in (k, k_t))
    weight, teacher_weight = (rows.random_tensor((n, c), dtype, device, g, 2.0 * max(1, c) ** -0.5) for c in (k, k_t))
    kwargs = {name: params[name] for name in _OPTIONS if name in params}
    if params.get("bias"):
        kwargs |= {name: rows.random_tensor((n,), dtype, device, g) for name in ("bias", "teacher_bias")}
    if "ignored" in params:
        target = torch.randint(0, max(1, n), shape, generator=g)
        target[torch.rand(shape, generator=g) < params["ignored"]] = params.get("ignore_index", -100)
        kwargs["target"] = target.to(device)
    return Sample((hidden, weight, teacher, teacher_weight), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Two products forward, two for the gradients; logits are read and written in neither, at best."""
    hidden, weight, teacher, _ = sample.args
    classes = weight.shape[0]
    read = rows.nbytes(*sample.args, *sample.kwargs.values())
    if direction == "fwd":
        return Cost(2 * (hidden.numel() + teacher.numel()) * classes, read, 4 * hidden.shape[:-1].numel())
    return Cost(4 * hidden.numel() * classes, read, rows.nbytes(hidden, weight))


WORKLOADS = (  # the backward of a mean only returns what the forward has computed
    Workload("llama3_1b_of_8b", {"M": 2048, "N": 128256, "K": 2048, "K_t": 4096}, directions=("fwd",)),
    Workload("llama3_8b_rows", {"M": 2048, "N": 128256, "K": 4096, "reduction": "none"}),
)
CPU_WORKLOADS = (Workload("small", {"M": 64, "N": 1024, "K": 128, "reduction": "none"}, (torch.float32,)),)

_SMALL = {"M": 9, "N": 40, "K": 24}
EDGE_CASES = (
    Workload("one_row: a single row", {"M": 1, "N": 64, "K": 32}),
    Workload("chunks: the last one is shorter, a teacher of other columns", {**_SMALL, "K_t": 32, "chunk_rows": 4}),
    Workload(
        "bias: of both, and rows without loss",
        {**_SMALL, "bias": True, "ignored": 0.4, "chunk_rows": 5, "reduction": "mean"},
    ),
    Workload("forward: KL(teacher || student)", {**_SMALL, "beta": 0.0, "temperature": 2.0, "reduction": "sum"}),
    Workload(
        "batch: a loss for each row, KL(student || teacher)",
        {**_SMALL, "beta": 1.0, "batch": 2, "reduction": "none", "chunk_rows": 4, "ignored": 0.3},
    ),
    Workload("hard: cross entropy in part", {**_SMALL, "hard_weight": 0.3, "ignored": 0.3, "chunk_rows": 4}),
    Workload("tvd: total variation", {**_SMALL, "kind": "tvd", "chunk_rows": 4}),
    Workload("empty: no rows", {"M": 0, "N": 40, "K": 24, "reduction": "sum"}),
)


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        arguments: dict[str, Any] = {
            "hidden": torch.ones(4, 8), "weight": torch.ones(6, 8), "teacher_hidden": torch.ones(4, 9),
            "teacher_weight": torch.ones(6, 9), **changes,
        }  # fmt: skip
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
        return Sample(tuple(moved.pop(n) for n in names), moved)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("mixed dtypes", "weight is torch.bfloat16, hidden is torch.float32", weight=torch.ones(6, 8).bfloat16()),
    _bad("weight of other columns", r"weight is \(6, 7\); needs \(V, 8\)", weight=torch.ones(6, 7)),
    _bad("a teacher of other rows", r"teacher_hidden is \(3, 9\); needs \(4, H_t\)", teacher_hidden=torch.ones(3, 9)),
    _bad("a teacher of other classes", r"teacher_weight is \(5, 9\); needs \(6, 9\)", teacher_weight=torch.ones(5, 9)),
    _bad("a bias of columns", r"teacher_bias is \(8,\); needs \(6,\)", teacher_bias=torch.ones(8)),
    _bad("too few targets", r"target is \(3,\); needs \(4,\)", target=torch.zeros(3, dtype=torch.int64)),
    _bad("no such reduction", "reduction is 'max'", reduction="max"),
    _bad("a hard loss without classes", "hard_weight is 0.5 without target", hard_weight=0.5),
    _bad("a hard weight above 1", "hard_weight is 2.0; needs 0 to 1", hard_weight=2.0),
    _bad("no rows in a chunk", "chunk_rows is 0; needs 1 or more", chunk_rows=0),
)
