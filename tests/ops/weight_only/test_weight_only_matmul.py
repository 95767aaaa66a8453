"""weight_only_matmul on the reference: the scale of every group, epilogues, shapes, gradients, and what is refused."""

import pytest
import torch
import torch.nn.functional as F

from tilewright.dispatch import contract
from tilewright.errors import BackendError, InputError
from tilewright.ops.weight_only import packing
from tilewright.ops.weight_only.dequantize_weight import dequantize_weight
from tilewright.ops.weight_only.quantize_weight import quantize_weight
from tilewright.ops.weight_only.weight_only_matmul import weight_only_matmul

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def operands(m, n, k, bits, dtype=bf16, scales=None):
    """x, q, scales; scales over twelve octaves."""
    x = torch.randn(m, k).to(dtype)
    q, _ = quantize_weight(torch.randn(n, k), bits=bits)
    sizes = torch.exp2(12 * torch.rand(n, packing.groups(k)) - 6) / (LARGEST[bits] * k**0.5)
    return x, q, packing.layout(scales or dtype).empty(n, k, "cpu").copy_(sizes)


LARGEST = {8: 127, 4: 7}


def exact(x, q, scales, magnitudes=False):
    """The product in float64, group by group; of magnitudes, what rounding errors are measured by."""
    integers = packing.unpack(q).double()
    if magnitudes:
        x, integers = x.abs(), integers.abs()
    made = x.new_zeros(x.shape[0], q.shape[0], dtype=torch.float64)
    for group in range(scales.shape[1]):
        at = slice(128 * group, 128 * group + 128)
        made += (x[:, at].double() @ integers[:, at].T) * scales[:, group].double()
    return made


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 128), (5, 48, 384), (17, 33, 300)])
@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_every_group_has_its_own_scale(bits, m, n, k, dtype):
    x, q, scales = operands(m, n, k, bits, dtype)
    made = weight_only_matmul(x, q, scales, out_dtype=fp32)
    assert ((made - exact(x, q, scales)).abs() <= 1e-6 * exact(x, q, scales, magnitudes=True)).all()


def test_it_is_the_product_by_the_dequantised_weight():
    x, q, scales = operands(6, 40, 256, 4)
    wide = dequantize_weight(q, scales, dtype=fp32)
    torch.testing.assert_close(weight_only_matmul(x, q, scales), F.linear(x.float(), wide).to(bf16))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu", "swiglu"])
def test_epilogues(activation):
    x, q, scales = operands(6, 40, 256, 8)
    bias = torch.randn(40)
    z = exact(x, q, scales) + bias
    wanted = {
        None: lambda: z,
        "relu": lambda: z.relu(),
        "gelu": lambda: F.gelu(z, approximate="tanh"),
        "silu": lambda: F.silu(z),
        "swiglu": lambda: F.silu(z[:, 0::2]) * z[:, 1::2],
    }[activation]()
    made = weight_only_matmul(x, q, scales, bias=bias, activation=activation, out_dtype=fp32)
    torch.testing.assert_close(made.double(), wanted, rtol=1e-5, atol=1e-5)


def test_leading_dimensions_and_out():
    x, q, scales = operands(6, 40, 256, 8)
    flat = weight_only_matmul(x, q, scales)
    made = weight_only_matmul(x.view(2, 3, 256), q, scales)
    assert made.shape == (2, 3, 40)
    assert torch.equal(made.view(6, 40), flat)
    out = torch.empty(2, 3, 40, dtype=bf16)
    assert weight_only_matmul(x.view(2, 3, 256), q, scales, out=out) is out
    assert torch.equal(out.view(6, 40), flat)
    with pytest.raises(InputError, match="out"):
        weight_only_matmul(x, q, scales, out=torch.empty(6, 41, dtype=bf16))


def test_x_gets_a_gradient_by_the_reference_and_the_weight_none():
    x, q, scales = operands(4, 24, 256, 4, fp32)
    x.requires_grad_()
    weight_only_matmul(x, q, scales).sum().backward()
    wanted = dequantize_weight(q, scales, dtype=fp32).sum(0).expand(4, -1)
    torch.testing.assert_close(x.grad, wanted)


def test_buckets_tell_bits_and_whether_the_copy_engine_can_read():
    bucket = contract("weight_only_matmul").forward.bucket
    x, q, scales = operands(3, 64, 256, 8)
    assert bucket(x, q, scales, None, "", bf16) == (4, 64, 256, 8, 1, 16, 0)
    assert bucket(x, q, scales, None, "swiglu", fp32) == (4, 64, 256, 8, 1, 32, 1)
    assert bucket(x, q, scales.contiguous(), None, "", bf16)[4] == 0, "scales row by row"
    assert bucket(x.new_empty(3, 257)[:, 1:], q, scales, None, "", bf16)[4] == 0
    x, q, scales = operands(3, 64, 256, 4)
    assert bucket(x, q, scales, None, "", bf16)[3:5] == (4, 1)


def test_a_backend_that_cannot_says_so():
    x, q, scales = operands(3, 64, 256, 8)
    with pytest.raises(BackendError, match="Supported here: torch"):
        weight_only_matmul(x, q, scales, backend="cuda")


@pytest.mark.parametrize(
    ("k", "options", "message"),
    [
        (
            128,
            {},
            "weight_only_matmul: x is (3, 128), q (64, 128) holds K=256 elements of 4 bits a row; they must agree in "
            "K.",
        ),
        (
            256,
            {"activation": "tanh"},
            "weight_only_matmul: activation is 'tanh'; allowed are None, 'relu', 'gelu', 'silu', 'swiglu'.",
        ),
        (
            256,
            {"out_dtype": torch.float64},
            "weight_only_matmul: out_dtype is torch.float64; allowed are bfloat16, float16 and float32.",
        ),
    ],
)
def test_what_is_refused(k, options, message):
    _, q, scales = operands(3, 64, 256, 4)
    with pytest.raises(InputError) as error:
        weight_only_matmul(torch.zeros(3, k, dtype=bf16), q, scales, **options)
    assert str(error.value) == message


def test_peers_of_the_bench_compute_the_same():
    from tilewright.dispatch import Sample
    from tilewright.ops.weight_only.peers.weight_only_matmul import PEERS

    x, q, scales = operands(4, 64, 256, 4)
    wanted = weight_only_matmul(x, q, scales, out_dtype=fp32)
    (yardstick,) = [peer for peer in PEERS if peer.name == "cublas_16bit"]
    call = yardstick.make(Sample((x, q, scales)))
    assert call is not None
    assert (call().float() - wanted).norm() < 1e-2 * wanted.norm()
    assert yardstick.make(Sample((x, q, scales), {"out_dtype": fp32})) is None
