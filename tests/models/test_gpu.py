"""Patched models on a GPU: the kernels that `auto` chooses, whole and compiled."""

import copy

import pytest
import torch
from tests.models.test_replaced import REPLACED, logits, relative_error
from tests.models.zoo import build, tokens

from tilewright.dispatch import record
from tilewright.models import patch
from tilewright.models.moe.experts import run_plainly

pytestmark = pytest.mark.gpu
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "max_position_embeddings": 512}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("name", REPLACED)
def test_accuracy(name: str, backend: str | None, dtype: torch.dtype) -> None:
    """Experts only in float32: in half types a router's near-tie falls one way or the other with any rounding."""
    if name in ("mixtral", "gpt_oss") and dtype is not torch.float32:
        pytest.skip("routing differs by rounding")
    options = {"head_dim": 64} if name in ("qwen3", "gemma2", "gemma3", "glm", "gpt_oss") else {}
    options |= {"first_k_dense_replace": 2} if "deepseek" in name else {}
    ids = tokens(2, 200).cuda()
    model = build(name, **{**WIDE, **options}).cuda().to(dtype)
    run_plainly(model)
    exact, unpatched = logits(copy.deepcopy(model).double(), ids), logits(model, ids)
    p = patch(model, verify=False, backend=backend)
    assert relative_error(logits(model, ids), exact) <= 2 * relative_error(unpatched, exact) + 1e-6
    p.undo()
    assert torch.equal(logits(model, ids), unpatched)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", REPLACED)
def test_probe_finds_the_same_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """The torch formulas agree with the modules there too, so nothing is left that a CPU would replace."""
    assert patch(build(name).cuda().to(dtype), verify=False).report().counts() == REPLACED[name]


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_verify_by_default(name: str) -> None:
    model = build(name, **WIDE).cuda().bfloat16()
    assert patch(model, mode="train").verify(tokens(4, 256)).passed


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first, throwaway capture
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    torch._dynamo.reset()
    model = build("llama", **WIDE).cuda().bfloat16()
    patch(model, verify=False)
    ids = tokens(2, 64).cuda()
    with torch.no_grad():
        eager = model(input_ids=ids, use_cache=False).logits
        compiled = torch.compile(model, fullgraph=True, mode=mode)
        for _ in range(3):
            got = compiled(input_ids=ids, use_cache=False).logits.clone()
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        truth = exact(input_ids=ids, use_cache=False).logits.double()
    assert relative_error(got, truth) <= 2 * relative_error(eager, truth) + 1e-6


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_attention_alone(name: str, dtype: torch.dtype, side: str) -> None:
    """Causal masks, windows and soft caps by Triton's kernels, with padding, which is a program."""
    ids, mask = tokens(2, 200).cuda(), torch.ones(2, 200, dtype=torch.long, device="cuda")
    if side != "none":
        mask[1, slice(77) if side == "left" else slice(-77, None)] = 0
    options = {"attn_implementation": "eager", "head_dim": 64} if name == "gemma2" else {}
    model = build(name, **{**WIDE, **options}).cuda().to(dtype)

    def run(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            made: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        return made

    # Not float64: Gemma's eager softmax is of float32, where the least float64 is -inf and a row of padding NaN
    exact, unpatched = run(copy.deepcopy(model).float()), run(model)
    assert exact.isfinite().all()
    patch(model, verify=False, ops=["attention"], backend="triton")
    with record() as recording:
        got = run(model)
    assert {(plan.op, plan.backend) for plan in recording.plans} == {("fmha", "triton")}
    assert relative_error(got, exact) <= 2 * relative_error(unpatched, exact) + 1e-6
