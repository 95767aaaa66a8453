"""nn.FP8Linear: three float8 products, a weight cast once a version, and a frozen form without a master."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn as torch_nn

from tilewright.errors import InputError
from tilewright.nn import fp8_linear
from tilewright.nn.fp8_linear import E4M3, FP8Linear
from tilewright.ops.quant import numbers
from tilewright.ops.quant.layout import BLOCK, TOKEN

HALF = torch.bfloat16
K, N = 160, 144


def rounded(x: torch.Tensor, layout) -> torch.Tensor:
    """What is left of x after a cast, in float64."""
    q, scales = numbers.cast(x.detach(), layout)
    return numbers.restore(q.double(), scales.double(), layout, torch.float64)


def layer(dtype=HALF, seed: int = 0, **options: Any) -> FP8Linear:
    torch.manual_seed(seed)
    return FP8Linear(K, N, dtype=dtype, **options)


def assert_rounded(got: torch.Tensor, exact: torch.Tensor) -> None:
    relative = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 1e-6}[got.dtype]
    bound = relative * exact.abs() + 1e-5 * exact.abs().amax()
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("bias", [True, False])
def test_parameters_and_state_dict_are_torchs(bias):
    theirs, ours = torch_nn.Linear(K, N, bias), FP8Linear(K, N, bias)
    assert isinstance(ours, torch_nn.Linear)
    assert [(k, v.shape) for k, v in ours.state_dict().items()] == [
        (k, v.shape) for k, v in theirs.state_dict().items()
    ]
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, K)
    exact = theirs(x)
    assert (ours(x) - exact).norm() < 0.06 * exact.norm()
    torch.testing.assert_close(ours(x[0, 0]), ours(x)[0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [(4, 8), (1, 5), (2, 136)], ids=str)
def test_all_three_products_are_those_of_rounded_numbers(dtype, tokens):
    ours = layer(dtype)
    x = torch.randn(*tokens, K).to(dtype).requires_grad_()
    y = ours(x)
    dy = torch.randn(*tokens, N).to(dtype)
    y.backward(dy)
    rows, grads = x.flatten(0, 1), dy.flatten(0, 1)
    weight = rounded(ours.weight, BLOCK)
    assert y.dtype == x.grad.dtype == ours.weight.grad.dtype == dtype
    assert_rounded(y.flatten(0, 1), rounded(rows, TOKEN) @ weight.mT + ours.bias.detach().double())
    assert_rounded(x.grad.flatten(0, 1), rounded(grads, TOKEN) @ weight)
    assert_rounded(ours.weight.grad, rounded(grads.mT, TOKEN) @ rounded(rows.mT, TOKEN).mT)
    assert_rounded(ours.bias.grad, grads.double().sum(0))


def test_float32_masters_under_autocast():
    ours, x = layer(torch.float32), torch.randn(6, K, requires_grad=True)
    with torch.autocast("cpu", HALF):
        y = ours(x)
    assert y.dtype == HALF
    assert_rounded(y, rounded(x, TOKEN) @ rounded(ours.weight, BLOCK).mT + ours.bias.detach().double())
    y.sum().backward()
    assert x.grad.dtype == ours.weight.grad.dtype == torch.float32


def test_a_weight_that_changes_before_the_backward_is_noticed():
    ours = layer()
    y = ours(torch.randn(4, K).to(HALF).requires_grad_())
    with torch.no_grad():
        ours.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_inference_mode_first_and_training_then():
    ours, x = layer(), torch.randn(4, K).to(HALF)
    with torch.inference_mode():
        y = ours(x)
    trained = ours(x.clone().requires_grad_())
    trained.sum().backward()
    assert torch.equal(y, trained)
    assert ours.weight.grad is not None


def test_only_wanted_gradients_are_computed(monkeypatch):
    ours = layer()
    ours.weight.requires_grad_(False)
    x = torch.randn(4, K).to(HALF).requires_grad_()
    monkeypatch.setattr(fp8_linear, "per_channel_cast_to_fp8", None)  # weight gradients would call it
    ours(x).sum().backward()
    assert x.grad is not None
    assert ours.weight.grad is None


def test_gradients_are_summed_in_float32_in_place():
    ours, plain = layer(grad_dtype=torch.float32), layer()
    exact = torch.zeros(N, K, dtype=torch.float64)
    place = None
    for at in range(5):
        g = torch.Generator().manual_seed(at)
        x, dy = (torch.randn(24, size, generator=g).to(HALF) for size in (K, N))
        for each in (ours, plain):
            each(x).backward(dy)
        exact += rounded(dy.mT, TOKEN) @ rounded(x.mT, TOKEN).mT
        place = place or ours.weight.grad.data_ptr()
        assert ours.weight.grad.data_ptr() == place
    assert ours.weight.grad.dtype == torch.float32
    assert_rounded(ours.weight.grad, exact)
    assert (ours.weight.grad - exact).norm() < 1e-3 * (plain.weight.grad - exact).norm()


def test_no_tokens():
    ours = layer()
    x = torch.randn(0, K).to(HALF).requires_grad_()
    y = ours(x)
    y.sum().backward()
    assert y.shape == (0, N)
    assert x.grad.shape == (0, K)
    assert (ours.weight.grad == 0).all()


@pytest.mark.parametrize("shape", [(128, 256), (100, 7), (1, 1)], ids=str)
def test_sizes(shape):
    torch.manual_seed(0)
    ours = FP8Linear(*shape)
    x = torch.randn(3, shape[0], requires_grad=True)
    y = ours(x)
    y.sum().backward()
    assert_rounded(y, rounded(x, TOKEN) @ rounded(ours.weight, BLOCK).mT + ours.bias.detach().double())
    assert ours.weight.grad.isfinite().all()


def test_frozen_keeps_float8_alone():
    ours, x = layer(), torch.randn(4, K).to(HALF)
    master = ours.weight.detach().clone()
    with torch.no_grad():
        y = ours(x)
        assert ours.freeze() is ours.freeze()
        assert torch.equal(ours(x), y)
    assert ours.frozen
    held = {name: (t.dtype, tuple(t.shape)) for name, t in ours.state_dict().items()}
    scales = (torch.float32, (2, 2))
    assert held == {"weight": (E4M3, (N, K)), "bias": (HALF, (N,)), "weight_scale_inv": scales}
    restored = numbers.restore(ours.weight.double(), ours.weight_scale_inv.double(), BLOCK, torch.float64)
    assert torch.equal(restored, rounded(master, BLOCK))
    assert "frozen=True" in repr(ours)


def test_frozen_from_torchs_layer_and_back_from_its_state():
    theirs = torch_nn.Linear(K, N, bias=False)
    ours = FP8Linear.from_linear(theirs, frozen=True)
    assert theirs.weight.dtype == torch.float32
    assert [*ours.state_dict()] == ["weight", "weight_scale_inv"]
    x = torch.randn(4, K)
    again = FP8Linear.from_linear(torch_nn.Linear(K, N, bias=False), frozen=True)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x), ours(x))
    wide = FP8Linear.from_linear(torch_nn.Linear(K, N, bias=False), frozen=True)
    wide.load_state_dict(theirs.state_dict())
    assert torch.equal(wide(x), ours(x))


def test_from_linear_shares_parameters():
    theirs = torch_nn.Linear(K, N).eval()
    ours = FP8Linear.from_linear(theirs)
    assert ours.weight is theirs.weight
    assert ours.bias is theirs.bias
    assert not ours.training


def test_dtypes_of_a_frozen_layer_stay():
    ours, x = layer(torch.float32).freeze(), torch.randn(4, K).to(HALF)
    before = {name: t.clone() for name, t in ours.state_dict().items()}
    ours.to(HALF)
    assert torch.equal(ours.weight.float(), before["weight"].float())
    assert torch.equal(ours.weight_scale_inv, before["weight_scale_inv"])
    assert (ours.weight.dtype, ours.weight_scale_inv.dtype, ours.bias.dtype) == (E4M3, torch.float32, HALF)
    assert ours(x).dtype == HALF
    ours.to("meta")
    assert ours.weight.is_meta
    assert ours.weight_scale_inv.is_meta


def test_gradients_go_through_a_frozen_layer():
    ours, x = layer().freeze(), torch.randn(4, K).to(HALF).requires_grad_()
    weight = numbers.restore(ours.weight.double(), ours.weight_scale_inv.double(), BLOCK, torch.float64)
    dy = torch.randn(4, N).to(HALF)
    ours(x).backward(dy)
    assert_rounded(x.grad, rounded(dy, TOKEN) @ weight)
    ours.weight.requires_grad_()
    with pytest.raises(InputError, match="a frozen weight is wanted, which has no master"):
        ours(x)


def saved(module: torch_nn.Module) -> torch_nn.Module:
    """Through torch's file format: Python's knows no float8."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    made: torch_nn.Module = torch.load(file, weights_only=False)
    return made


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("how", [copy.deepcopy, saved], ids=["copy", "file"])
def test_copies(how, frozen):
    ours, x = layer(), torch.randn(4, K).to(HALF)
    ours = ours.freeze() if frozen else ours
    with torch.no_grad():
        y = ours(x)
        twin = how(ours)
        assert torch.equal(twin(x), y)
        if not frozen:
            assert torch.equal(pickle.loads(pickle.dumps(ours))(x), y)
            ours.weight.zero_()
            assert torch.equal(twin(x), y)


@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_inference(frozen):
    ours, x = layer().requires_grad_(False), torch.randn(4, K).to(HALF)
    ours = ours.freeze() if frozen else ours
    made = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert torch.equal(made(x), ours(x))
    if not frozen:
        ours.weight.data.mul_(2)
        ours.requantise()
        assert torch.equal(made(x), ours(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_training_is_a_graph_break():
    ours, x = layer(), torch.randn(4, K).to(HALF)

    def step(x):
        return ours(x * 2).sum()

    eager = step(x)
    made = torch.compile(step, backend="aot_eager")(x)
    made.backward()
    assert torch.equal(made, eager)
    assert ours.weight.grad is not None


def test_what_is_refused():
    with pytest.raises(InputError, match=r"weight is torch.float64; needs bfloat16, float16 or float32"):
        FP8Linear(4, 4, dtype=torch.float64)
    with pytest.raises(InputError, match=r"grad_dtype is torch.float16"):
        FP8Linear(4, 4, grad_dtype=torch.float16)
    with pytest.raises(InputError, match=r"x is torch.int64"):
        layer()(torch.ones(2, K, dtype=torch.int64))


def test_training_reaches_what_bf16_reaches():
    """A regression of 64 steps: float8 ends within a few percent of torch's layer."""
    torch.manual_seed(0)
    target = torch.randn(K, 32) * K**-0.5
    ends = []
    for made in (torch_nn.Linear(K, 64), FP8Linear(K, 64)):
        torch.manual_seed(1)
        model = torch_nn.Sequential(made, torch_nn.ReLU(), torch_nn.Linear(64, 32))
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.1)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(64):
            x = torch.randn(64, K)
            loss = (model(x) - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append(loss.item())
    assert ends[0] < 0.7
    assert ends[1] == pytest.approx(ends[0], rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 300, 4096])
def test_three_products_on_a_gpu(tokens):
    torch.manual_seed(0)
    ours = FP8Linear(1024, 1536, dtype=HALF, device="cuda", grad_dtype=torch.float32)
    x = torch.randn(tokens, 1024, device="cuda").to(HALF).requires_grad_()
    dy = torch.randn(tokens, 1536, device="cuda").to(HALF)
    y = ours(x)
    y.backward(dy)
    weight = rounded(ours.weight, BLOCK)
    wanted = (
        (y, rounded(x, TOKEN) @ weight.mT + ours.bias.detach().double()),
        (x.grad, rounded(dy, TOKEN) @ weight),
        (ours.weight.grad, rounded(dy.mT, TOKEN) @ rounded(x.mT, TOKEN).mT),
    )
    for got, exact in wanted:
        # Tensor cores keep some 14 bits of a sum of 128 products, and the results above are rounded to bf16
        assert (got.double() - exact).norm() < 3e-3 * exact.norm()


@pytest.mark.gpu
def test_a_frozen_layer_in_a_cuda_graph():
    ours = FP8Linear(1024, 1536, dtype=HALF, device="cuda").freeze()
    x = torch.randn(16, 1024, device="cuda").to(HALF)
    with torch.no_grad():
        ours(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, ours(x))


@pytest.mark.gpu
def test_training_in_a_cuda_graph_casts_the_weight_in_every_replay():
    ours = FP8Linear(256, 384, dtype=HALF, device="cuda")
    x = torch.randn(32, 256, device="cuda").to(HALF)
    ours(x)  # compiles, and leaves a cast behind
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        y = ours(x)
    torch_nn.init.normal_(ours.weight)
    graph.replay()
    assert torch.equal(y, ours(x))
