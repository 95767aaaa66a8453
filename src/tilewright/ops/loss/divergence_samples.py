"""Problems of `jsd`: random ones, costs, workloads, edge cases, bad inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows

_OPTIONS = ("beta", "temperature", "reduction", "ignore_index", "log_probs", "kind")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, N classes, optional scale; ignored (part of the rows), batch=B for rows (B, M), index_dtype, the
    options; hidden to set every third class of odd rows of both to -inf.
    """
    m, n, g = params["M"], params["N"], rows.generator(seed + 1)
    shape = (params["batch"], m) if "batch" in params else (m,)
    scale = params.get("scale", 2.0)
    student, teacher = (rows.random_tensor((*shape, n), dtype, device, rows.generator(seed + i), scale) for i in (0, 2))
    if params.get("hidden"):
        for t in (student, teacher):
            t[..., 1::2, ::3] = -torch.inf
    if params.get("log_probs"):
        student, teacher = (torch.log_softmax(t.float(), -1).to(dtype) for t in (student, teacher))
    kwargs = {name: params[name] for name in _OPTIONS if name in params}
    if "ignored" not in params:
        return Sample((student, teacher), kwargs)
    target = torch.randint(0, max(1, n), shape, generator=g)
    target[torch.rand(shape, generator=g) < params["ignored"]] = params.get("ignore_index", -100)
    return Sample((student, teacher, target.to(device, params.get("index_dtype", torch.int64))), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads student and teacher.  Backward reads both and writes the student's gradient."""
    student, teacher, *rest = sample.args
    read, count = rows.nbytes(student, teacher, *rest), student.shape[:-1].numel()
    if direction == "fwd":
        return Cost(12 * student.numel(), read, 24 * count)
    return Cost(12 * student.numel(), read + 20 * count, rows.nbytes(student))


_LLAMA = {"M": 4096, "N": 128256}
WORKLOADS = (
    Workload("llama3_4096", _LLAMA),
    Workload("llama3_4096_forward: KL(teacher || student)", {**_LLAMA, "beta": 0.0}),
    Workload("qwen3_2048: prompts ignored", {"M": 2048, "N": 151936, "ignored": 0.5}),
)
CPU_WORKLOADS = (Workload("small", {"M": 32, "N": 2048}, (torch.bfloat16, torch.float32)),)

EDGE_CASES = (
    Workload("one_row: a single program", {"M": 1, "N": 64}),
    Workload("odd_n: the tail of a row is masked", {"M": 5, "N": 77, "beta": 0.1}),
    Workload("n_1: the loss is 0", {"M": 3, "N": 1}),
    Workload("long_row: many steps, which are read again", {"M": 2, "N": 4301, "reduction": "sum"}),
    Workload("forward: KL(teacher || student)", {"M": 6, "N": 48, "beta": 0.0, "temperature": 2.0}),
    Workload("reverse: KL(student || teacher)", {"M": 6, "N": 48, "beta": 1.0, "ignored": 0.3}),
    Workload(
        "log_probs: gradients without a softmax, and the mean over elements",
        {"M": 6, "N": 40, "log_probs": True, "reduction": "mean", "beta": 0.7},
    ),
    Workload("tvd: total variation", {"M": 5, "N": 77, "kind": "tvd", "temperature": 2.0, "ignored": 0.3}),
    Workload("log_probs_reverse", {"M": 4, "N": 40, "log_probs": True, "beta": 1.0}),
    Workload(
        "batch: a loss for each row, targets of 32 bits, another ignore_index",
        {"M": 5, "N": 36, "batch": 2, "reduction": "none", "ignored": 0.4, "index_dtype": torch.int32,
         "ignore_index": 3},
    ),
    Workload("masked: classes without probability", {"M": 4, "N": 50, "hidden": True}),
    Workload("empty: no rows", {"M": 0, "N": 64, "reduction": "sum"}),
)  # fmt: skip


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        arguments = {"student": torch.ones(4, 8), "teacher": torch.ones(4, 8), **changes}
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        return Sample((moved.pop("student"), moved.pop("teacher")), moved)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("integers", "student is torch.int32", student=torch.ones(4, 8, dtype=torch.int32)),
    _bad("other classes", r"teacher is \(4, 9\)", teacher=torch.ones(4, 9)),
    _bad("mixed dtypes", "teacher is .* torch.bfloat16", teacher=torch.ones(4, 8).bfloat16()),
    _bad("no classes", r"student is \(4, 0\)", student=torch.ones(4, 0), teacher=torch.ones(4, 0)),
    _bad("too few targets", r"target is \(3,\); needs \(4,\)", target=torch.zeros(3, dtype=torch.int64)),
    _bad("a beta above 1", "beta is 1.5; needs 0 to 1", beta=1.5),
    _bad("a beta of total variation", "beta is 0.3, which kind='tvd' has not", beta=0.3, kind="tvd"),
    _bad("no such kind", "kind is 'kl'; needs one of jsd, tvd", kind="kl"),
    _bad("a temperature of 0", "temperature is 0.0; needs a number above 0", temperature=0.0),
    _bad("a temperature of log-probabilities", "log_probs=True needs 1", temperature=2.0, log_probs=True),
    _bad("no such reduction", "reduction is 'max'; needs one of batchmean, mean, sum, none", reduction="max"),
)
