"""Random problems, costs and bad calls of the family: ragged groups, empty groups, one group with all rows."""

import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample
from tilewright.ops import rows
from tilewright.ops.gemm.operands import FP8, columns_out
from tilewright.ops.gemm.scaled.scaling import Scaling
from tilewright.ops.quant.layout import ScaleLayout

EXPERTS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
"""(N, K) of experts, as DeepGEMM's own benchmark lists them."""
_OPTIONS = ("activation", "out_dtype")


def grouped(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: G, M (rows a group has on average), N, K, optional split ("even"; "random", "one", "sparse"), layout
    ("nt"; "nn"), activation, out_dtype; of float8 also scaling (a `Scaling`).  All rows belong to groups.
    """
    draw = _Draw(params, dtype, device, seed)
    sizes = parts(params["G"] * params["M"], params["G"], params.get("split", "even"), seed)
    a, scale_a = draw.operand((sum(sizes), params["K"]), transposed=False, is_a=True)
    b, scale_b = draw.weights()
    return Sample((a, b, _ends(sizes, device)), draw.options(scale_a, scale_b))


def masked(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: G, M (rows of every group, all of which count), N, K; else as `grouped`."""
    draw = _Draw(params, dtype, device, seed)
    groups, m = params["G"], params["M"]
    a, scale_a = draw.operand((groups, m, params["K"]), transposed=False, is_a=True)
    b, scale_b = draw.weights()
    counts = torch.tensor([m] * groups, dtype=torch.int32, device=device)
    return Sample((a, b, counts), draw.options(scale_a, scale_b))


def along_k(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: G, M, N, K (rows summed a group, on average), optional split, layout ("tn"; all four), c, out_dtype; of
    float8 also scaling, and K a multiple of 128.
    """
    draw = _Draw(params, dtype, device, seed)
    unit = 128 if dtype == FP8 and params.get("scaling") is not None else 1
    sizes = [unit * n for n in parts(params["G"] * params["K"] // unit, params["G"], params.get("split", "even"), seed)]
    total, layout = sum(sizes), params.get("layout", "tn")
    a, scale_a = draw.operand((params["M"], total), transposed=layout[0] == "t", is_a=True)
    b, scale_b = draw.operand((params["N"], total), transposed=layout[1] == "n", is_a=False)
    options = {} if scale_a is None or scale_b is None else {"scale_a": scale_a, "scale_b": scale_b.mT}
    if params.get("out_dtype"):
        options["out_dtype"] = params["out_dtype"]
    if params.get("c"):
        options["c"] = draw.normal((params["G"], params["M"], params["N"]), torch.float32)
    return Sample((a, b.mT, _ends(sizes, device)), options)


def parts(total: int, groups: int, split: str, seed: int) -> list[int]:
    """Returns sizes of `groups` groups, `total` together.  even: as equal as whole numbers are.   random: uniform cuts.
    one: a single group has all.   sparse: every other group is empty.
    """
    draw = random.Random(seed)
    if split == "one":
        full = draw.randrange(groups)
        return [total if g == full else 0 for g in range(groups)]
    if split == "sparse":
        halves = parts(total, -(-groups // 2), "random", seed)
        return [halves[g // 2] if g % 2 == 0 else 0 for g in range(groups)]
    cuts = [total * g // groups for g in range(1, groups)]
    if split == "random":
        cuts = sorted(draw.randint(0, total) for _ in cuts)
    edges = [0, *cuts, total]
    return [end - start for start, end in pairwise(edges)]


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)


class _Draw:
    """Operands of one problem.  Elements are of size 1 and 1/sqrt(K), so that results are of size 1; float8 gets
    these sizes from scales, log-uniform over six octaves, so that a scale of the wrong block shows.
    """

    def __init__(self, params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._params, self._dtype, self._device, self._generator = params, dtype, device, rows.generator(seed)

    def normal(self, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        return rows.random_tensor(shape, dtype, self._device, self._generator, scale)

    def operand(self, shape: tuple[int, ...], *, transposed: bool, is_a: bool) -> tuple[Tensor, Tensor | None]:
        """Returns (..., R, K), contiguous along K unless `transposed`, and its scales."""
        *lead, num_rows, k = shape
        size = 1.0 if is_a else max(self._params["K"], 1) ** -0.5
        scaling = self._params.get("scaling") if self._dtype == FP8 else None
        values = self.normal((*lead, k, num_rows) if transposed else shape, self._dtype, size if scaling is None else 8)
        values = values.mT if transposed else values
        if scaling is None:
            return values, None
        layout: ScaleLayout = Scaling(scaling).layouts[0 if is_a else 1]
        scales = layout.empty(num_rows, k, self._device, *lead)
        octaves = torch.rand(scales.shape, generator=self._generator)
        return values, scales.copy_((torch.exp2(6 * octaves - 3) * (size / 8)).to(self._device))

    def weights(self) -> tuple[Tensor, Tensor | None]:
        """b (G, K, N) and its scales (G, K blocks, N blocks)."""
        params = self._params
        n = params["N"] + (params["N"] % 2 if params.get("activation") == "swiglu" else 0)
        transposed = params.get("layout", "nt")[1] == "n"
        b, scales = self.operand((params["G"], n, params["K"]), transposed=transposed, is_a=False)
        return b.mT, None if scales is None else scales.mT

    def options(self, scale_a: Tensor | None, scale_b: Tensor | None) -> dict[str, Any]:
        """Returns options of the public function."""
        kwargs = {name: self._params[name] for name in _OPTIONS if self._params.get(name) is not None}
        return kwargs if scale_a is None else {**kwargs, "scale_a": scale_a, "scale_b": scale_b}


def _result_type(sample: Sample) -> torch.dtype:
    a = sample.args[0]
    dtype: torch.dtype = sample.kwargs.get("out_dtype") or (torch.bfloat16 if a.dtype == FP8 else a.dtype)
    return dtype


def rows_cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; rows that count are read and written once, and so are the weights of every
    group that has some.  Waits for the sizes of groups.
    """
    a, b, ends = sample.args
    options = sample.kwargs
    limits = ends.tolist()
    sizes = limits if a.dim() == 3 else [end - start for start, end in zip([0, *limits], limits, strict=False)]
    total, nonempty = sum(sizes), sum(size > 0 for size in sizes)
    (groups, k, n), all_rows = b.shape, max(a.numel() // max(a.shape[-1], 1), 1)
    a_bytes = rows.nbytes(a, options.get("scale_a")) * total // all_rows
    weights = rows.nbytes(b, options.get("scale_b")) * nonempty // max(groups, 1)
    result_bytes = total * columns_out(n, options.get("activation") or "") * _result_type(sample).itemsize
    flops = 2 * total * k * n
    if direction == "fwd":
        return Cost(flops, a_bytes + weights + rows.nbytes(ends), result_bytes)
    return Cost(2 * flops, a_bytes + weights + result_bytes, a_bytes + rows.nbytes(b))


def along_k_cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; operands and c once, the results once."""
    a, b, ends = sample.args
    options = sample.kwargs
    out_dtype = options.get("out_dtype") or torch.float32
    result = ends.shape[0] * a.shape[0] * b.shape[1]
    read = rows.nbytes(a, b, ends, options.get("scale_a"), options.get("scale_b"), options.get("c"))
    return Cost(2 * a.numel() * b.shape[1], read, result * out_dtype.itemsize)


def bad_rows(*, masked: bool) -> tuple[BadInput, ...]:
    """Calls of `grouped_matmul`, or of `masked_matmul`, that must fail."""
    name = "rows" if masked else "ends"

    def bad(
        what: str,
        match: str,
        a: tuple[int, ...] = (2, 4, 8) if masked else (8, 8),
        b: tuple[int, ...] = (2, 8, 6),
        sizes: Any = (torch.int32, 2),
        dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
        **options: Any,
    ) -> BadInput:
        def make(device: torch.device) -> Sample:
            def ones(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
                return torch.ones(shape, device=device).to(dtype)

            limits = torch.ones(sizes[1:], dtype=sizes[0], device=device) if isinstance(sizes, tuple) else sizes
            kwargs = {k: ones(*v) if isinstance(v, tuple) else v for k, v in options.items()}
            return Sample((ones(a, dtypes[0]), ones(b, dtypes[1]), limits), kwargs)

        return BadInput(what, make, match)

    half, fp8 = torch.bfloat16, torch.float8_e4m3fn
    lead = (2,) if masked else ()
    tall = (2, 4, 256) if masked else (8, 256)
    return (
        bad("K differs", "agree in K", b=(2, 7, 6)),
        bad("K differs once transposed", "agree in K", trans_b=True),
        bad("one matrix for all", r"needs \(.*K\) and \(G, K, N\)", b=(8, 6)),
        bad("a vector", "needs", a=(8,)),
        bad("two dtypes", "a is torch.float32, b is torch.bfloat16", dtypes=(torch.float32, half)),
        bad("integers", "a is torch.int32; needs one of", dtypes=(torch.int32, torch.int32)),
        bad("sizes in 64 bits", rf"{name} is \(2,\) torch.int64; needs \(2,\) torch.int32", sizes=(torch.int64, 2)),
        bad("one size too many", rf"{name} is \(3,\) torch.int32", sizes=(torch.int32, 3)),
        bad("sizes in a list", rf"{name} is a list; needs a tensor of 2 int32", sizes=[1, 2]),
        bad("unknown activation", "activation is 'tanh'; allowed are None, 'relu'", activation="tanh"),
        bad("odd columns for a gate", "has 7; N must be even", b=(2, 8, 7), activation="swiglu"),
        bad("integer result", "out_dtype is torch.int32; of torch.float32 operands", out_dtype=torch.int32),
        bad("scales of bfloat16", "scales go with float8_e4m3fn operands", dtypes=(half, half),
            scale_a=((*lead, 1, 1),), scale_b=((2, 1, 1),)),
        bad("one scale alone", "scale_b is missing", dtypes=(fp8, fp8), scale_a=((*lead, 1, 1),)),
        bad("scales of another K", r"scale_a is .* it may be .*\(1x128\)", a=tall, b=(2, 256, 6), dtypes=(fp8, fp8),
            scale_a=((*tall[:-1], 3),), scale_b=((2, 2, 1),)),
        bad("scales not transposed", r"scale_b is \(2, .* Scales are given as their operand is", a=tall, b=(2, 256, 6),
            dtypes=(fp8, fp8), scale_a=((*tall[:-1], 2),), scale_b=((2, 1, 2),)),
    )  # fmt: skip


def _bad_along_k(
    what: str, match: str, a: tuple[int, ...], b: tuple[int, ...], ends: torch.dtype = torch.int32, **options: Any
) -> BadInput:
    def make(device: torch.device) -> Sample:
        limits = torch.ones(2, dtype=ends, device=device)
        kwargs = {k: torch.ones(v, device=device) if isinstance(v, tuple) else v for k, v in options.items()}
        return Sample((torch.ones(a, device=device), torch.ones(b, device=device), limits), kwargs)

    return BadInput(what, make, match)


BAD_ALONG_K = (
    _bad_along_k("T differs", "of one T", (4, 8), (7, 6)),
    _bad_along_k("T differs once transposed", "of one T", (4, 8), (8, 6), trans_a=True),
    _bad_along_k("a batch", "needs \\(M, T\\) and \\(T, N\\)", (2, 4, 8), (8, 6)),
    _bad_along_k("ends in 64 bits", "ends is \\(2,\\) torch.int64", (4, 8), (8, 6), ends=torch.int64),
    _bad_along_k("c of one group", r"c is \(4, 6\); needs \(2, 4, 6\)", (4, 8), (8, 6), c=(4, 6)),
    _bad_along_k("integer result", "out_dtype is torch.int32", (4, 8), (8, 6), out_dtype=torch.int32),
    _bad_along_k("scales of float32", "scales go with float8", (4, 8), (8, 6), scale_a=(1, 1), scale_b=(1, 1)),
)
