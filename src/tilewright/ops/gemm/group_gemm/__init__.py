"""Products of different shapes in one call.  The contract."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.gemm.dense.checks import RESULTS, check_operands, check_out_dtype
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.gemm.operands import LAYOUTS, aligned, layout_code, unit_stride

_UNIT = 16  # elements: where a result may begin, 32 bytes of a half type


@dispatch("group_gemm")
def group_gemm(
    list_a: Sequence[Tensor],
    list_b: Sequence[Tensor],
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> list[Tensor]:
    """[a @ b for a, b in zip(list_a, list_b)], accumulated in float32 and rounded once, in one call.

    list_a: matrices (M_i, K_i), list_b: (K_i, N_i), of any shapes and strides, bf16|fp16|fp32, all of one dtype on one
    device.   Returns the products (M_i, N_i) in out_dtype (by default that of the operands), views of one allocation.
    For equal shapes `bmm` is simpler, for groups of rows of one matrix `grouped_matmul`.   backend: run on exactly this
    backend ("cuda", "triton", "torch") or raise BackendError.   No gradient.
    Raises InputError for empty lists, lists of different lengths, and what `matmul` refuses of each pair.
    """
    args = _arguments(list_a, list_b, out_dtype)
    flat: Tensor = call(CONTRACT, args, backend)
    return [flat[offset : offset + m * n].view(m, n) for offset, m, n in zip(*offsets(*args[:4]), strict=True)]


def _arguments(list_a: Any, list_b: Any, out_dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Returns the first pair, then lists of the others: dispatch reads device and dtype from the first tensor."""
    a, b = list(list_a), list(list_b)
    if not a or len(a) != len(b):
        raise InputError(f"group_gemm: {len(a)} matrices a and {len(b)} b; needs as many of each, at least one.")
    for left, right in zip(a, b, strict=True):
        check_operands("group_gemm", left, right)
    a, b = [unit_stride(t) for t in a], [unit_stride(t) for t in b]
    return a[0], b[0], a[1:], b[1:], out_dtype or a[0].dtype


def offsets(
    a: Tensor, b: Tensor, more_a: Sequence[Tensor], more_b: Sequence[Tensor]
) -> tuple[list[int], list[int], list[int]]:
    """Returns the offset of each product in one tensor, and its rows and columns."""
    m, n = [t.shape[0] for t in (a, *more_a)], [t.shape[1] for t in (b, *more_b)]
    starts, offset = [], 0
    for num_rows, columns in zip(m, n, strict=True):
        starts.append(offset)
        offset += -(-num_rows * columns // _UNIT) * _UNIT
    return starts, m, n


def _outputs(
    a: Tensor, b: Tensor, more_a: Sequence[Tensor], more_b: Sequence[Tensor], out_dtype: torch.dtype
) -> tuple[tuple[tuple[int], torch.dtype]]:
    starts, m, n = offsets(a, b, more_a, more_b)
    return (((starts[-1] + m[-1] * n[-1],), out_dtype),)


def _raw(a: Tensor, b: Tensor, more_a: Sequence[Tensor], more_b: Sequence[Tensor], out_dtype: torch.dtype) -> Tensor:
    products = reference([a, *more_a], [b, *more_b], out_dtype=out_dtype)
    padded = [torch.nn.functional.pad(d.flatten(), (0, -d.numel() % _UNIT)) for d in products[:-1]]
    return torch.cat([*padded, products[-1].flatten()])


def reference(
    list_a: Sequence[Tensor], list_b: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The same in plain torch, one product after the other."""
    a, b, more_a, more_b, dtype = _arguments(list_a, list_b, out_dtype)
    pairs = zip((a, *more_a), (b, *more_b), strict=True)
    return [product(left, right, None, None, None, 1.0, "", dtype) for left, right in pairs]


def _bucket(
    a: Tensor, b: Tensor, more_a: Sequence[Tensor], more_b: Sequence[Tensor], out_dtype: torch.dtype
) -> tuple[int, ...]:
    lefts, rights = (a, *more_a), (b, *more_b)
    most = [max(hint(t.shape[dim]) for t in ts) for ts, dim in ((lefts, 0), (rights, 1), (lefts, 1))]
    copied = all(aligned(x, y, y.shape[1], out_dtype) for x, y in zip(lefts, rights, strict=True))
    return row_bucket(most[0]), most[1], most[2], len(lefts), layout_code(a, b), 8 * out_dtype.itemsize, int(copied)


FORWARD = RawOp(
    "group_gemm",
    "fwd",
    "Tensor a, Tensor b, Tensor[] more_a, Tensor[] more_b, ScalarType out_dtype",
    package=__name__,
    outputs=_outputs,
    reference=_raw,
    bucket=_bucket,
    bucket_names=("M", "N", "K", "G", "layout", "out_bits", "aligned"),
    dtypes=RESULTS,
)


def check(a: Tensor, b: Tensor, more_a: Sequence[Tensor], more_b: Sequence[Tensor], out_dtype: torch.dtype) -> None:
    """Raises InputError for what the docstring of `group_gemm` excludes."""
    op = "group_gemm"
    for i, (left, right) in enumerate(zip((a, *more_a), (b, *more_b), strict=True)):
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
            raise InputError(
                f"{op}: a[{i}] is {tuple(left.shape)} and b[{i}] is {tuple(right.shape)}; needs (M, K) and (K, N)."
            )
        if left.dtype != a.dtype or left.device != a.device:
            raise InputError(
                f"{op}: a[{i}] is {left.dtype} on {left.device}, a[0] {a.dtype} on {a.device}; all must be alike."
            )
        if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            raise InputError(f"{op} has no gradient, and pair {i} requires one. Use matmul, or torch.no_grad().")
    if a.dtype not in (*RESULTS, torch.float64):
        raise InputError(f"{op}: operands are {a.dtype}; needs bfloat16, float16 or float32.")
    check_out_dtype(op, a.dtype, out_dtype)


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: sizes, ((M, N, K), ...), optional layout ("nn"; all four, or "mixed"), out_dtype."""
    g = rows.generator(seed)
    a, b = [], []
    for i, (m, n, k) in enumerate(params["sizes"]):
        layout = params.get("layout", "nn")
        layout = LAYOUTS[i % 4] if layout == "mixed" else layout
        left = rows.random_tensor((k, m) if layout[0] == "t" else (m, k), dtype, device, g)
        right = rows.random_tensor((k, n) if layout in ("nn", "tn") else (n, k), dtype, device, g, max(k, 1) ** -0.5)
        a.append(left.mT if layout[0] == "t" else left)
        b.append(right if layout in ("nn", "tn") else right.mT)
    return Sample((a, b), {"out_dtype": params["out_dtype"]} if params.get("out_dtype") else {})


def cost(sample: Sample, direction: str) -> Cost:
    """Two operations a product of elements; operands once, results once."""
    a, b = sample.args
    out_dtype = sample.kwargs.get("out_dtype") or a[0].dtype
    flops = sum(2 * left.numel() * right.shape[1] for left, right in zip(a, b, strict=True))
    elements = sum(left.shape[0] * right.shape[1] for left, right in zip(a, b, strict=True))
    return Cost(flops, rows.nbytes(*a, *b), elements * out_dtype.itemsize)


def _ones(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    return lambda d: [torch.ones(shape, dtype=dtype, device=d) for shape in shapes]


def _bad(name: str, match: str, a: Any, b: Any, **options: Any) -> BadInput:
    return BadInput(name, lambda d: Sample((a(d), b(d)), options), match)


def _case(name: str, *sizes: tuple[int, int, int], **options: Any) -> Workload:
    return Workload(name, {"sizes": sizes, **options}, directions=("fwd",))


_LORA = tuple((m, n, k) for m in (64, 512, 1024, 4096) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336)))

CONTRACT = register(
    Contract(
        name="group_gemm",
        family="grouped",
        summary="products of different shapes in one call",
        reference=reference,
        forward=FORWARD,
        check=check,
        inputs=inputs,
        cost=cost,
        workloads=(_case("twelve_layers", *_LORA, layout="nt"),),
        cpu_workloads=(_case("small", (64, 128, 128), (16, 256, 64), (32, 32, 512)),),
        edge_cases=(
            _case("ragged: no two of one shape", (70, 72, 40), (1, 136, 56), (33, 40, 200)),
            _case("nt: all b transposed", (20, 72, 40), (64, 8, 56), layout="nt"),
            _case("tn: all a transposed", (24, 72, 40), (64, 8, 56), layout="tn"),
            _case("mixed: every layout", (20, 72, 40), (8, 16, 56), (24, 40, 32), (16, 24, 48), layout="mixed"),
            _case("odd_sizes: no row is aligned", (7, 33, 45), (1, 1, 1), (5, 3, 70)),
            _case("one: a single product", (37, 72, 40)),
            _case("many: more than are read at once", *((3, 8 + i % 3, 16) for i in range(70))),
            _case("float32: results are wider than operands", (20, 72, 40), (9, 8, 56), out_dtype=torch.float32),
            _case("hollow: products without rows or depth", (20, 24, 40), (0, 8, 56), (9, 8, 0)),
        ),
        edge_grid={
            "sizes": (
                ((0, 8, 16), (1, 1, 1), (2, 2, 2)),
                ((15, 16, 17), (63, 64, 65), (1, 128, 8)),
                ((127, 65, 33), (64, 0, 64), (64, 64, 0), (128, 129, 257)),
                ((256, 255, 31), (2, 257, 128)),
                ((16, 8, 24),),
            )
        },
        bad_inputs=(
            _bad("no matrices", "at least one", _ones(), _ones()),
            _bad("one b too few", "2 matrices a and 1 b", _ones((2, 3), (2, 3)), _ones((3, 4))),
            _bad(
                "K differs", r"a\[1\] is \(2, 3\) and b\[1\] is \(4, 4\)", _ones((2, 3), (2, 3)), _ones((3, 4), (4, 4))
            ),
            _bad("a batch", r"a\[0\] is \(2, 2, 3\)", _ones((2, 2, 3)), _ones((3, 4))),
            _bad("integers", "a is torch.int32", _ones((2, 3), dtype=torch.int32), _ones((3, 4), dtype=torch.int32)),
            _bad("two dtypes", "they must have one dtype", _ones((2, 3)), _ones((3, 4), dtype=torch.bfloat16)),
            _bad("integer result", "out_dtype is torch.int32", _ones((2, 3)), _ones((3, 4)), out_dtype=torch.int32),
        ),
        batch_dim=None,
    )
)
