"""Problems of the forms of cross entropy: random ones, costs, workloads, edge cases, bad inputs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows

_OPTIONS = ("label_smoothing", "z_loss", "softcap", "reduction", "ignore_index")


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, N classes, optional scale; ignored (part of the rows), weight (True, or a dtype), index_dtype,
    batch=B for logits (B, M, N), the options; hidden=v to set every third logit of odd rows to v.
    """
    m, n, g = params["M"], params["N"], rows.generator(seed + 1)
    shape = (params["batch"], m) if "batch" in params else (m,)
    logits = rows.random_tensor((*shape, n), dtype, device, rows.generator(seed), params.get("scale", 2.0))
    if "hidden" in params:
        logits[..., 1::2, ::3] = params["hidden"]
    target = torch.randint(0, max(1, n), shape, generator=g)  # without classes no target is right
    target[torch.rand(shape, generator=g) < params.get("ignored", 0.0)] = params.get("ignore_index", -100)
    kwargs = {name: params[name] for name in _OPTIONS if name in params}
    if params.get("weight"):
        precision = torch.float32 if params["weight"] is True else params["weight"]
        kwargs["weight"] = (0.5 + torch.rand((n,), generator=g)).to(device, precision)
    return Sample((logits, target.to(device, params.get("index_dtype", torch.int64))), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """Forward reads logits and targets, backward logits, whose gradient it writes.  Nothing reads ignored rows."""
    logits, target = sample.args
    small = rows.nbytes(target, *sample.kwargs.values())
    elements = _rows_read(target, sample.kwargs.get("ignore_index", -100)) * logits.shape[-1]
    nbytes = elements * logits.element_size() + small
    return Cost(4 * elements, nbytes, 8 * target.numel() if direction == "fwd" else rows.nbytes(logits))


def _rows_read(target: Tensor, ignore_index: int) -> int:
    """Rows that are not ignored; all of targets without data."""
    if target.is_meta or is_fake(target):
        return target.numel()
    return int((target != ignore_index).sum())


_LLAMA = {"M": 4096, "N": 128256}
WORKLOADS = (
    Workload("llama3_4096", _LLAMA),
    Workload("llama2_8192", {"M": 8192, "N": 32000}),
    Workload("gpt2_4096: rows of odd length", {"M": 4096, "N": 50257}),
    Workload("gemma2_2048: softcap, z-loss", {"M": 2048, "N": 256000, "softcap": 30.0, "z_loss": 1e-4}),
    Workload("smooth_4096: label smoothing", {**_LLAMA, "label_smoothing": 0.1}),
    Workload("imagenet_8192: a thousand classes", {"M": 8192, "N": 1000, "label_smoothing": 0.1}),
)
CPU_WORKLOADS = (Workload("small", {"M": 64, "N": 4096}, (torch.bfloat16, torch.float32)),)

_ALL = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "weight": True, "ignored": 0.3}
EDGE_CASES = (
    Workload("one_row: a single program", {"M": 1, "N": 256}),
    Workload("odd_n: rows begin at any element", {"M": 7, "N": 333}),
    Workload("n_1: the loss is 0", {"M": 5, "N": 1}),
    Workload("n_3: less than a vector", {"M": 6, "N": 3, "ignored": 0.4}),
    Workload("long_row: many steps", {"M": 3, "N": 20011, "reduction": "sum"}),
    Workload("vectors: whole vectors that the compiler does not see", {"M": 4, "N": 1368, "reduction": "none"}),
    Workload("ignored: rows that are not read", {"M": 12, "N": 96, "ignored": 0.5}),
    Workload("smooth: label smoothing", {"M": 6, "N": 130, "label_smoothing": 0.2}),
    Workload("z_loss: added to the loss", {"M": 6, "N": 160, "z_loss": 1e-2, "ignored": 0.3}),
    Workload("softcap: as Gemma 2", {"M": 6, "N": 144, "softcap": 3.0, "scale": 4.0}),
    Workload("weights: of classes", {"M": 9, "N": 48, "weight": True, "ignored": 0.2}),
    Workload("all: every option, mean", {"M": 11, "N": 80, **_ALL}),
    Workload("all_sum: every option, sum", {"M": 11, "N": 77, **_ALL, "reduction": "sum"}),
    Workload("all_none: every option, a loss for each row", {"M": 11, "N": 80, **_ALL, "reduction": "none"}),
    Workload(
        "int32: targets of 32 bits, another ignore_index",
        {"M": 8, "N": 64, "index_dtype": torch.int32, "ignore_index": 3, "ignored": 0.3},
    ),
    Workload("batch: more dimensions", {"M": 5, "N": 72, "batch": 2, "reduction": "none"}),
    Workload("masked: a low number in some rows", {"M": 6, "N": 300, "hidden": -1e4}),
    Workload("peaked: large logits", {"M": 8, "N": 512, "scale": 8.0}),
    Workload("empty: no rows", {"M": 0, "N": 64, "reduction": "sum"}),
)


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    def make(device: torch.device) -> Sample:
        arguments = {"logits": torch.ones(4, 8), "target": torch.zeros(4, dtype=torch.int64), **changes}
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
        return Sample((moved.pop("logits"), moved.pop("target")), moved)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("integers", "logits is torch.int32", logits=torch.ones(4, 8, dtype=torch.int32)),
    _bad("no classes", r"logits is \(4, 0\)", logits=torch.ones(4, 0)),
    _bad("targets as numbers", "target is torch.float32; needs int64 or int32", target=torch.zeros(4)),
    _bad("too few targets", r"target is \(3,\); needs \(4,\)", target=torch.zeros(3, dtype=torch.int64)),
    _bad("a reduction of batches", "reduction is 'batchmean'; needs one of mean, sum, none", reduction="batchmean"),
    _bad("too smooth", "label_smoothing is 1.5; needs 0 to 1", label_smoothing=1.5),
    _bad("a negative z_loss", "z_loss is -1.0; needs 0 or more", z_loss=-1.0),
    _bad("a softcap of 0", "softcap is 0.0; needs a number above 0", softcap=0.0),
    _bad("weights of rows", r"weight is \(4,\)", weight=torch.ones(4)),
    _bad("integer weights", "weight is .* torch.int64", weight=torch.ones(8, dtype=torch.int64)),
)
