"""qk_norm_rope is the norms and the rotation of the models it stands for, bit for bit, and its gradients are theirs."""

import importlib

import pytest
import torch

from tilewright import ops
from tilewright.dispatch import implementations
from tilewright.errors import BackendError, InputError
from tilewright.ops.rope.apply_rope.args import RopeBucket
from tilewright.ops.rope.qk_norm_rope import CONTRACT, qk_norm_rope
from tilewright.ops.rope.tables import RopeConfig, rope_table

DEVICES = [pytest.param("cpu", marks=pytest.mark.interp), pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
B, H, H_KV, S, D = 2, 6, 2, 11, 32
MODELS = {
    "qwen3.Qwen3RMSNorm": {},
    "qwen3_moe.Qwen3MoeRMSNorm": {},
    "glm4_moe.Glm4MoeRMSNorm": {"rotary_dim": D // 2},
    "gemma3.Gemma3RMSNorm": {"offset": 1.0},
}
FORMS = (
    {},
    {"offset": 1.0, "rotary_dim": 12},
    {"fp32_weight": True, "interleaved": True, "rotary_dim": 12, "eps": 0.1},
)


def problem(dtype, device="cpu", options=(), d=D):
    """q and k, slices of one projection, their weights, and tables of rows B * S."""
    rng = torch.Generator().manual_seed(0)
    qkv = torch.randn(B, S, H + 2 * H_KV, d, generator=rng).to(device, dtype).transpose(1, 2)
    weights = [torch.randn(d, generator=rng).to(device, dtype) for _ in range(2)]
    cos, sin = rope_table(RopeConfig(dict(options).get("rotary_dim", d), B * S, {}), dtype=dtype)
    return qkv[:, :H], qkv[:, H : H + H_KV], *weights, *(t.view(B, S, -1).to(device) for t in (cos, sin))


def with_gradients(function, problem, *cotangents):
    """q', k' and the gradients of q, k and the weights, of which q and k stay views."""
    leaves = [t.detach().requires_grad_() for t in problem[:4]]
    outputs = function(*leaves, *problem[4:])
    return *(o.detach() for o in outputs), *torch.autograd.grad(outputs, leaves, cotangents)


@pytest.mark.parametrize("model", MODELS)
def test_it_is_the_models_code_bit_for_bit(model):
    """Gradients too: the reference has the operations of the model."""
    pytest.importorskip("transformers")
    name, _, cls = model.partition(".")
    file, form = importlib.import_module(f"transformers.models.{name}.modeling_{name}"), MODELS[model]

    for dtype in DTYPES:
        case = problem(dtype, options=form)
        cotangents = torch.randn(B, H, S, D).to(dtype), torch.randn(B, H_KV, S, D).to(dtype)

        def theirs(q, k, q_weight, k_weight, cos, sin):
            norms = getattr(file, cls)(D, eps=1e-5), getattr(file, cls)(D, eps=1e-5)
            q, k = (
                torch.func.functional_call(norm, {"weight": w}, x)
                for norm, w, x in zip(norms, (q_weight, k_weight), (q, k), strict=True)
            )
            return file.apply_rotary_pos_emb(q, k, cos, sin)

        ours = with_gradients(lambda *a: qk_norm_rope(*a, eps=1e-5, **form, backend="torch"), case, *cotangents)
        for a, b in zip(ours, with_gradients(theirs, case, *cotangents), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_round_where_the_norm_and_the_rotation_do(device, form):
    """In bf16, the coarsest; a sum of squares in another order may move x_hat by a rounding, here and there."""
    case = problem(torch.bfloat16, device, form)
    ours, theirs = (qk_norm_rope(*case, **form, backend=backend) for backend in ("triton", "torch"))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=2**-7)
        assert (a != b).float().mean() < 0.01


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_gradients_are_those_of_the_two_ops(device, form):
    """Cotangents as sums give them: one number, expanded."""
    case = problem(torch.float32, device, form)
    cotangents = [torch.randn(n, 1, 1, device=device).expand(B, n, S, D) for n in (H, H_KV)]
    norm = {name: form[name] for name in ("eps", "offset", "fp32_weight") if name in form}
    rope = {name: form[name] for name in ("interleaved", "rotary_dim") if name in form}

    def apart(q, k, q_weight, k_weight, cos, sin):
        normed = ops.rms_norm(q, q_weight, **norm, backend="torch"), ops.rms_norm(k, k_weight, **norm, backend="torch")
        return ops.apply_rope(*normed, cos, sin, **rope, backend="torch")

    ours = with_gradients(lambda *a: qk_norm_rope(*a, **form, backend="triton"), case, *cotangents)
    for a, b in zip(ours, with_gradients(apart, case, *cotangents), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradients_are_those_of_differences(form):
    case = [t[:, :2, :2] if t.dim() == 4 else t for t in problem(torch.float64, options=form)]
    cos, sin = (t[:, :2] for t in case[4:])
    leaves = [t.detach().clone().requires_grad_() for t in case[:4]]
    assert torch.autograd.gradcheck(lambda *a: qk_norm_rope(*a, cos, sin, **form), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *a: qk_norm_rope(*a, cos, sin, **form), leaves, fast_mode=True)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_one_side_alone_gets_gradients(device, side):
    """A loss of q' alone with frozen weights, and one of k' alone."""
    case = problem(torch.float32, device)
    results = []
    for backend in ("triton", "torch"):
        leaves = [t.detach().requires_grad_(i < 2 or side == 1) for i, t in enumerate(case[:4])]
        qk_norm_rope(*leaves, *case[4:], backend=backend)[side].square().sum().backward()
        results.append([t.grad for t in leaves])
    assert [g is None for g in results[0]] == ([True, False, True, False] if side else [False, True, True, True])
    for ours, theirs in zip(*results, strict=True):
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_numbers_that_are_none_stay_in_their_head(device):
    q, k, *rest = problem(torch.float32, device)
    q = q.clone()
    q[0, 1, 3, 2], q[1, 0, 0, 5] = torch.nan, torch.inf
    for ours, theirs in zip(*(qk_norm_rope(q, k, *rest, backend=b) for b in ("triton", "torch")), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        assert int(ours.isnan().any(-1).sum()) == int(theirs.isnan().any(-1).sum())


@pytest.mark.interp
@pytest.mark.parametrize("bad", [-1, 8, 2**40])
def test_a_position_outside_the_table_shows_as_nan(bad):
    """Positions are not looked at first, as on a GPU.  Other tokens, and elements not turned, stay right."""
    from tilewright.ops.rope.kernels.triton.qk_norm_rope import configure, launch
    from tilewright.ops.rope.qk_norm_rope.args import QkNormRopeArgs

    q, k, weight, table = torch.randn(1, 2, 5, 8), torch.randn(1, 1, 5, 8), torch.rand(8), torch.rand(8, 2)
    positions = torch.tensor([[0, 1, bad, 3, 7]])
    outs = torch.empty_like(q), torch.empty_like(k)
    args = QkNormRopeArgs(q, k, weight, weight, table, table, positions, 1e-6, 0.0, False, False, 4)
    launch(outs, args, configure(CONTRACT.forward.bucket(*args), torch.float32))
    wanted = qk_norm_rope(*args[:6], positions=positions.clamp(0, 7), rotary_dim=4, backend="torch")
    for ours, theirs in zip(outs, wanted, strict=True):
        assert ours[:, :, 2, :4].isnan().all()
        theirs[:, :, 2, :4] = torch.nan
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_the_dtype_of_the_result():
    """Wider weights promote what is rounded before them, and nothing else."""
    q, k, *rest = problem(torch.bfloat16)
    wide = [w.float() for w in rest[:2]]
    assert qk_norm_rope(q, k, *wide, *rest[2:])[0].dtype == torch.float32
    assert qk_norm_rope(q, k, *wide, *rest[2:], fp32_weight=True)[0].dtype == torch.bfloat16


def test_the_result_lies_as_q_does_and_gradients_by_token():
    case = problem(torch.float32)
    ours = with_gradients(qk_norm_rope, case, torch.ones(B, H, S, D), torch.ones(B, H_KV, S, D))
    raw = CONTRACT.forward(*case, None, 1e-6, 0.0, False, False, 0, "auto", "default")
    assert all(o.transpose(1, 2).is_contiguous() for o in raw)
    assert all(torch.equal(a, b) for a, b in zip(raw, ours[:2], strict=True))
    by_head = CONTRACT.forward(*(t.contiguous() for t in case), None, 1e-6, 0.0, False, False, 0, "auto", "default")
    assert all(o.is_contiguous() for o in by_head)


def test_refusals():
    q, k, q_weight, k_weight, cos, sin = problem(torch.float32)
    with pytest.raises(InputError, match=r"qk_norm_rope: cos or sin requires a gradient .*cos\.detach\(\)"):
        qk_norm_rope(q, k, q_weight, k_weight, cos.clone().requires_grad_(), sin)
    with pytest.raises(InputError, match=r"qk_norm_rope: positions reach from 0 to 99"):
        qk_norm_rope(q, k, q_weight, k_weight, cos[0], sin[0], positions=torch.full((1, S), 99) * torch.arange(S).gt(0))
    with pytest.raises(BackendError, match=r"qk_norm_rope\[triton\]"):
        qk_norm_rope(q, k, q_weight, k_weight, cos, sin, backend="triton")


def test_every_choice_is_listed():
    """Heads of more than 512 elements are torch's."""
    kernel = pytest.importorskip("tilewright.ops.rope.kernels.triton.qk_norm_rope")
    for direction, choose in (("fwd", kernel.configure), ("bwd", kernel.configure_backward)):
        listed = implementations("qk_norm_rope", direction)["triton"].configs
        choices = {
            choose(RopeBucket(t, h, 2, d, r), dtype)
            for t in (1, 64, 1 << 20)
            for h in (1, 32)
            for d in (2, 33, 64, 80, 128, 200, 256, 320, 512)
            for r in (2, d // 2 // 2 * 2 or 2, d // 2 * 2)
            for dtype in DTYPES
        }
        assert choices == set(listed)
        assert choose(RopeBucket(64, 4, 2, 514, 64), torch.bfloat16) is None
