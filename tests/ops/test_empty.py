"""Tensors without elements: torch's result and torch's gradients, whatever dimension is 0, also by `out=`, under
torch.compile, and when the call is made again.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tilewright import ops
from tilewright.dispatch import contracts, implementations
from tilewright.dispatch.backends import missing

SHAPES = ((0, 8), (3, 0), (0, 0), (2, 0, 8), (2, 3, 0), (0,))
INTERP, GPU = pytest.mark.interp, pytest.mark.gpu
PLACES = [
    pytest.param("torch", "cpu", id="torch"),
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted", marks=INTERP),
    *(pytest.param(name, "cuda", id=f"{name}-cuda", marks=GPU) for name in ("triton", "cutile", "torch", None)),
]


def halves(x):
    n = x.shape[-1] // 2
    return x[..., :n], x[..., n:]


# the op, what torch computes, and which of the arguments are vectors (N,); "packed" ones are (..., 2 N)
ROWS = {
    "rms_norm": (lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), "mv"),
    "add_rms_norm": (lambda x, r, w: (F.rms_norm(x + r, w.shape, w, 1e-6), x + r), "mmv"),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, w.shape, w, b), "mvv"),
    "rms_norm_gated": (lambda x, g, w: F.rms_norm(x, w.shape, w, 1e-6) * F.silu(g), "mmv"),
    "softmax": (lambda x: F.softmax(x, -1), "m"),
    "silu_and_mul": (lambda x: F.silu(halves(x)[0]) * halves(x)[1], "p"),
    "gelu_and_mul": (lambda x: F.gelu(halves(x)[0], approximate="tanh") * halves(x)[1], "p"),
    "swiglu": (lambda gate, up: F.silu(gate) * up, "mm"),
    "geglu": (lambda gate, up: F.gelu(gate, approximate="tanh") * up, "mm"),
    "relu2": (lambda x: torch.square(F.relu(x)), "m"),
}
CASTS = {
    "per_token_cast_to_fp8": ({}, {"group": None}, {"packed": True}),
    "per_block_cast_to_fp8": ({}, {"transpose": True}),
    "per_channel_cast_to_fp8": ({}, {"transpose": True}),
    "per_tensor_cast_to_fp8": ({},),
}
FUSED = {"rms_norm_fp8": "mv", "add_rms_norm_fp8": "mmv", "swiglu_fp8": "mm", "silu_and_mul_fp8": "p"}


def of(name, backend, device):
    """The op on one backend; skips where it has none."""
    op = contracts()[name].forward
    if backend not in (None, "torch") and backend not in implementations(op.op, op.direction):
        pytest.skip(f"{name} has no {backend}")
    if backend not in (None, "torch") and device == "cuda" and missing(backend, device) is not None:
        pytest.skip(f"no {backend} here")
    return partial(getattr(ops, name), backend=backend)


def arguments(kinds, shape, device):
    sizes = {"m": shape, "v": shape[-1:], "p": (*shape[:-1], 2 * shape[-1])}
    return [torch.randn(sizes[kind], device=device) for kind in kinds]


def differentiated(function, given):
    given = [t.detach().clone().requires_grad_() for t in given]
    made = function(*given)
    made = made if isinstance(made, tuple) else (made,)
    return [t.detach() for t in made], torch.autograd.grad(made, given, [torch.ones_like(t) for t in made])


def same(ours, wanted):
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_rows(backend, device, name, shape):
    plain, kinds = ROWS[name]
    function, given = of(name, backend, device), arguments(kinds, shape, device)
    outputs, gradients = differentiated(plain, given)
    for _ in range(3):  # the second and the third are replays
        ours, grads = differentiated(function, given)
        same(ours, outputs)
        same(grads, gradients)
        made = function(*given)
        same(made if isinstance(made, tuple) else (made,), outputs)
    if contracts()[name].forward.torch_out is not None:
        out = torch.empty_like(outputs[0])
        assert function(*given, out=out) is out


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_softmax_along_any_dimension(backend, device, shape, dim):
    x = torch.randn(shape, device=device)
    same([of("softmax", backend, device)(x, dim)], [F.softmax(x, dim)])


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_casts(backend, device, name, shape):
    x = torch.randn(shape, device=device)
    for options in CASTS[name]:
        q, scales = of(name, backend, device)(x, **options)
        wanted = contracts()[name].reference(x, **options)
        assert [(t.shape, t.dtype) for t in (q, scales)] == [(t.shape, t.dtype) for t in wanted]
        torch.testing.assert_close(scales, wanted[1], rtol=0, atol=0)  # one for a whole empty row is that of zeros
        assert of("dequantize", backend, device)(q, scales).shape == q.shape


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_norms_and_gates_to_float8(backend, device, name, shape):
    given = arguments(FUSED[name], shape, device)
    made, wanted = of(name, backend, device)(*given), contracts()[name].reference(*given)
    assert [(t.shape, t.dtype) for t in made] == [(t.shape, t.dtype) for t in wanted]


@pytest.mark.parametrize("sizes", [(0, 3, 2, 1), (2, 0, 2, 1), (2, 3, 0, 1), (2, 3, 2, 0), (0, 0, 0, 0), (2, 1, 0, 0)])
@pytest.mark.parametrize(("backend", "device"), PLACES)
def test_rope(backend, device, sizes):
    b, s, h, h_kv = sizes
    q, k = (torch.randn(b, s, heads, 8, device=device).transpose(1, 2) for heads in (h, h_kv))
    table = torch.randn(1, s, 4, device=device).repeat(1, 1, 2)
    rope = of("apply_rope", backend, device)
    wanted = differentiated(lambda q, k: contracts()["apply_rope"].reference(q, k, table, table), (q, k))
    for _ in range(3):
        made = differentiated(lambda q, k: rope(q, k, table, table), (q, k))
        for ours, theirs in zip(made, wanted, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_compiled(name, shape):
    plain, kinds = ROWS[name]
    given = arguments(kinds, shape, "cpu")
    torch._dynamo.reset()
    compiled = torch.compile(getattr(ops, name), backend="aot_eager", fullgraph=True)
    for ours, wanted in zip(differentiated(compiled, given), differentiated(plain, given), strict=True):
        same(ours, wanted)
