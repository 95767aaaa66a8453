"""Products of different shapes in one call."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Contract, Cost, RawOp, Sample, Workload, call, dispatch, register
from tilewright.dispatch.bucket import hint, row_bucket
from tilewright.errors import InputError
from tilewright.ops import rows
from tilewright.ops.gemm.dense.args import plain_args
from tilewright.ops.gemm.dense.checks import check_operands, check_out_dtype
from tilewright.ops.gemm.dense.reference import product
from tilewright.ops.gemm.operands import LAYOUTS, RESULTS, aligned, layout_code, unit_stride

_UNIT = 16  # elements: where a result may begin, 32 bytes of a half type


class GroupGemmArgs(NamedTuple):
    """The first pair, then lists of the others: dispatch reads device and dtype from the first tensor."""

    a: Tensor  # (M_0, K_0)
    b: Tensor  # (K_0, N_0)
    more_a: list[Tensor]  # (M_i, K_i)
    more_b: list[Tensor]  # (K_i, N_i)
    out_dtype: torch.dtype

    @property
    def lefts(self) -> list[Tensor]:
        """Every a."""
        return [self.a, *self.more_a]

    @property
    def rights(self) -> list[Tensor]:
        """Every b."""
        return [self.b, *self.more_b]


class GroupGemmBucket(NamedTuple):
    """M, N, K: the largest of all products."""

    M: int
    N: int
    K: int
    G: int
    layout: int
    out_bits: int
    aligned: int


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
    return [flat[offset : offset + m * n].view(m, n) for offset, m, n in zip(*offsets(args), strict=True)]


def _arguments(list_a: Any, list_b: Any, out_dtype: torch.dtype | None) -> GroupGemmArgs:
    a, b = list(list_a), list(list_b)
    if not a or len(a) != len(b):
        raise InputError(f"group_gemm: {len(a)} matrices a and {len(b)} b; needs as many of each, at least one.")
    for left, right in zip(a, b, strict=True):
        check_operands("group_gemm", left, right)
    a, b = [unit_stride(t) for t in a], [unit_stride(t) for t in b]
    return GroupGemmArgs(a[0], b[0], a[1:], b[1:], out_dtype or a[0].dtype)


def offsets(args: GroupGemmArgs) -> tuple[list[int], list[int], list[int]]:
    """Returns the offset of each product in one tensor, and its rows and columns."""
    m, n = [t.shape[0] for t in args.lefts], [t.shape[1] for t in args.rights]
    starts, offset = [], 0
    for num_rows, columns in zip(m, n, strict=True):
        starts.append(offset)
        offset += -(-num_rows * columns // _UNIT) * _UNIT
    return starts, m, n


def _outputs(args: GroupGemmArgs) -> tuple[tuple[tuple[int], torch.dtype]]:
    starts, m, n = offsets(args)
    return (((starts[-1] + m[-1] * n[-1],), args.out_dtype),)


def _raw(args: GroupGemmArgs) -> Tensor:
    products = reference(args.lefts, args.rights, out_dtype=args.out_dtype)
    padded = [torch.nn.functional.pad(d.flatten(), (0, -d.numel() % _UNIT)) for d in products[:-1]]
    return torch.cat([*padded, products[-1].flatten()])


def reference(
    list_a: Sequence[Tensor], list_b: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> list[Tensor]:
    """The same in plain torch, one product after the other."""
    args = _arguments(list_a, list_b, out_dtype)
    pairs = zip(args.lefts, args.rights, strict=True)
    return [product(plain_args(left, right, args.out_dtype)) for left, right in pairs]


def _bucket(args: GroupGemmArgs) -> GroupGemmBucket:
    lefts, rights = args.lefts, args.rights
    return GroupGemmBucket(
        M=row_bucket(max(hint(t.shape[0]) for t in lefts)),
        N=max(hint(t.shape[1]) for t in rights),
        K=max(hint(t.shape[1]) for t in lefts),
        G=len(lefts),
        layout=layout_code(args.a, args.b),
        out_bits=8 * args.out_dtype.itemsize,
        aligned=int(all(aligned(x, y, y.shape[1], args.out_dtype) for x, y in zip(lefts, rights, strict=True))),
    )


FORWARD = RawOp(
    "group_gemm",
    "fwd",
    GroupGemmArgs,
    package="tilewright.ops.gemm",
    kernels=("sm90.group_gemm", "triton.group_gemm"),
    outputs=_outputs,
    reference=_raw,
    bucket=_bucket,
    bucket_names=GroupGemmBucket._fields,
    batch_fields=("M",),
    dtypes=RESULTS,
)


def check(args: GroupGemmArgs) -> None:
    """Raises InputError for what the docstring of `group_gemm` excludes."""
    op = "group_gemm"
    a = args.a
    for i, (left, right) in enumerate(zip(args.lefts, args.rights, strict=True)):
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
    check_out_dtype(op, a.dtype, args.out_dtype)


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
