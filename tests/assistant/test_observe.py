"""What is seen of a model is counted right, and looking leaves no trace."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.assistant.planted import ceilings, prompts, tiny_llama
from torch import nn
from torch._C._autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from tilewright.assistant.loop import _doubts
from tilewright.assistant.observation import observe as observe_module
from tilewright.assistant.observation.attribution import around_modules
from tilewright.assistant.observation.condense import condense, pattern
from tilewright.assistant.observation.cost import count
from tilewright.assistant.observation.graph_breaks import graph_breaks
from tilewright.assistant.observation.observe import Phase, observe
from tilewright.assistant.observation.profile import _LABEL, _on_gpu, profile_modules, union_us
from tilewright.assistant.predict import Roof, gain_of, host_us, matmul_us, phases_now, predict, roofline
from tilewright.assistant.scene import Scene
from tilewright.assistant.shares import Share
from tilewright.assistant.workload import workload


@pytest.fixture(scope="module")
def seen():
    torch.set_num_threads(1)
    model = tiny_llama()
    return model, observe(model, workload(model, prompts=prompts(), new_tokens=4))


class Block(nn.Module):
    """y = relu(x W): bytes and flops are known by hand."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 32, bias=False)

    def forward(self, x):
        return torch.relu(self.linear(x))


def test_costs_of_a_module_counted_by_hand():
    model, x = Block(), torch.randn(8, 16)
    costs = {cost.path: cost for cost in count(model, lambda: model(x)).modules}
    linear, outer = costs["linear"], costs[""]
    assert linear.flops == 2 * 8 * 16 * 32
    assert outer.flops == 0
    assert (linear.bytes_read, linear.bytes_written) == (4 * (8 * 16 + 16 * 32), 4 * 8 * 32)
    assert (outer.bytes_read, outer.bytes_written) == (4 * 8 * 32, 4 * 8 * 32)
    assert [(p.m, p.n, p.k) for p in linear.matmuls] == [(8, 32, 16)]
    assert outer.peak_bytes == 2 * 4 * 8 * 32  # the product is alive until relu has read it
    assert linear.peak_bytes == 4 * 8 * 32


def test_flops_agree_with_torch_but_for_cpu_attention(seen):
    model, observation = seen
    work = workload(model, prompts=prompts(), new_tokens=4)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        work.prefill(model)
    ours = sum(cost.flops for cost in observation.phase("prefill").costs)
    attention = sum(
        4 * a.heads * a.s_q * a.s_kv * a.dim for c in observation.phase("prefill").costs for a in c.attentions
    )
    assert ours in (counter.get_total_flops(), counter.get_total_flops() + attention)


def test_module_times_add_up(seen):
    _, observation = seen
    for phase in observation.phases:
        total = next(module.total_us for module in phase.modules if module.path == "")
        assert sum(module.self_us for module in phase.modules) == pytest.approx(total, rel=1e-6)
        assert phase.wall_us > 0
        assert phase.kernels > 50


def test_decoding_is_a_phase_of_its_own(seen):
    _, observation = seen
    decode = observation.phase("decode")
    assert decode.calls == 4
    assert all(product.m == 1 for cost in decode.costs if cost.module_class == "Linear" for product in cost.matmuls)
    assert observation.request_us == observation.whole_us > 0
    steps = observation.phase("prefill").wall_us + 4 * decode.wall_us
    assert observation.loop_us == pytest.approx(max(0.0, observation.whole_us - steps))


def test_every_class_gets_a_roof(seen):
    _, observation = seen
    roofs = {(roof.phase, roof.module_class): roof for roof in roofline(observation, ceilings())}
    linear = roofs["prefill", "Linear"]
    assert linear.calls == 2 * 7 + 1
    assert linear.floor_us > 0
    assert linear.flops > 0
    assert roofs["prefill", "LlamaRMSNorm"].floor_us == pytest.approx(2 * 2 + 1, rel=0.01)  # 1 us for each call


def test_small_products_take_their_share_of_the_smallest_measured_one():
    assert matmul_us(ceilings(), 512, 1024, 1024, 2, "float32") == pytest.approx(2.0)
    assert matmul_us(ceilings(), 1, 32, 64, 1, "float32") <= 1.0
    assert matmul_us(ceilings(), 1, 64, 64, 1, "bfloat16") == 0.0


def test_a_share_of_the_bound_becomes_a_gain_of_the_whole_request():
    """Of 40 us in a request of 100, half to all are saved, besides 5 us won or lost."""
    found = gain_of(40.0, 100.0, Share(0.5, 0.75, 1.0, margin=0.05))
    assert found.low == pytest.approx(100 / 85)
    assert found.expected == pytest.approx(100 / 70)
    assert found.high == pytest.approx(100 / 55)
    nothing = gain_of(0.0, 100.0, Share(0.5, 0.75, 1.0, margin=0.05))
    assert nothing.low < 1.0 == nothing.expected < nothing.high
    assert gain_of(-30.0, 100.0, Share(0.5, 0.75, 1.0)).expected < 1.0


def test_host_time_is_won_once(seen):
    """After a compiled step no host time is left in decoding, for whatever comes later."""
    model, observation = seen
    work = workload(model, prompts=prompts(), new_tokens=4)
    before = Scene(model, work, observation, ceilings())
    after = replace(before, in_force=("compiled_decode",), request_us=observation.request_us / 2)
    decode = observation.phase("decode")
    assert host_us(before, decode) > 0
    left = next(phase for phase in phases_now(after) if phase.name == "decode")
    assert left.wall_us == pytest.approx(decode.wall_us - host_us(before, decode))
    assert phases_now(before) == observation.phases
    nothing = predict(after, "compiled_decode", lambda phase: host_us(after, phase), "")
    assert nothing.bound_us < predict(before, "compiled_decode", lambda phase: host_us(before, phase), "").bound_us


def test_a_step_that_was_slow_by_itself_is_no_longer_than_in_a_request():
    prefill = Phase("prefill", 1, 100.0, 90.0, 0.1, 10, [], {})
    step = Phase("decode", 10, 60.0, 6.0, 0.9, 10, [], {})
    observe_module._fit_steps([prefill, step], 300.0)
    assert step.wall_us == pytest.approx(20.0)
    assert step.idle_share == pytest.approx(0.7)


def event(name, device, start, end, parent=None, kernels=(), annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=device,
        time_range=SimpleNamespace(start=start, end=end),
        cpu_parent=parent,
        kernels=[SimpleNamespace(name=kernel, duration=us) for kernel, us in kernels],
        is_user_annotation=annotation,
    )


def test_kernels_are_charged_to_the_modules_around_their_launch():
    cpu, gpu = DeviceType.CPU, DeviceType.CUDA
    outer = event(_LABEL, cpu, 0, 100, annotation=True, kernels=[(_LABEL, 90.0)])
    inner = event(_LABEL + "0", cpu, 5, 40, parent=outer, annotation=True, kernels=[("triton_fused", 7.0)])
    events = [
        outer,
        inner,
        event("aten::mm", cpu, 10, 20, parent=inner, kernels=[("gemm", 30.0)]),
        event("tilewright::_add_rms_norm_fwd", cpu, 50, 60, parent=outer, kernels=[("add", 4.0)]),
        event("gemm", gpu, 20, 50),
        event("triton_fused", gpu, 45, 52),  # overlaps the product by 5
        event("add", gpu, 60, 64),
        event(_LABEL, gpu, 0, 90, annotation=True),  # the label's shadow on the device: no work
    ]
    found = _on_gpu(events, {"": "Model", "0": "Block"})
    times = {module.path: (module.total_us, module.self_us) for module in found.modules}
    assert times == {"": (41.0, 4.0), "0": (37.0, 37.0)}
    assert found.busy_us == 36.0
    assert found.kernels == 3
    assert found.ops["gemm"] == 30


def test_a_condensed_observation_keeps_the_sums(seen):
    _, observation = seen
    small = condense(observation)
    for before, after in zip(observation.phases, small.phases, strict=True):
        assert sum(m.self_us for m in after.modules) == pytest.approx(sum(m.self_us for m in before.modules))
        assert sum(c.flops for c in after.costs) == sum(c.flops for c in before.costs)
        assert {c.path for c in after.costs} >= {"", "model.layers.*", "model.layers.*.mlp.gate_proj"}
        assert not any(".0" in c.path for c in after.costs)
    assert pattern("layers.10.block.3") == "layers.*.block.*"
    assert pattern("0.conv1d") == "*.conv1d"


def test_a_floor_above_the_measured_time_is_doubted(seen):
    _, observation = seen
    slow = [Roof("prefill", "Linear", 1, 1.0, 2 * observation.phase("prefill").wall_us, 0, 0)]
    assert "busy" in _doubts(slow, observation)[0]
    assert _doubts([], observation) == []


def test_union_of_overlapping_intervals():
    assert union_us([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4.0
    assert union_us([]) == 0.0


def test_graph_breaks_are_counted_with_their_place():
    class Breaks(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x + 1
            return x - 1

    found = graph_breaks(Breaks(), lambda model: model(torch.ones(3)))
    assert found.breaks >= 1
    assert "test_observe.py" in found.reasons[0]
    assert graph_breaks(Block(), lambda model: model(torch.ones(3, 16))).breaks == 0


def test_a_model_dynamo_cannot_trace_is_an_observation():
    class Refuses(nn.Module):
        def forward(self, x):
            raise LookupError("never mind")

    found = graph_breaks(Refuses(), lambda model: model(torch.ones(3)))
    assert found.graphs is None
    assert "never mind" in found.reasons[0]


def test_compiled_modules_are_labelled_as_one_unit():
    model = nn.Sequential(Block(), nn.Linear(32, 4))
    called = []
    model[0]._compiled_call_impl = lambda x: called.append("compiled") or model[0]._call_impl(x)
    x = torch.randn(8, 16)
    found = profile_modules(model, lambda: model(x), torch.device("cpu"))
    assert {module.path for module in found.modules} == {"", "0", "1"}
    assert called
    assert not model[0]._forward_hooks


def test_hooks_are_removed_when_the_model_raises():
    model = Block()
    with pytest.raises(RuntimeError), around_modules(model, lambda path, module: torch.no_grad()):
        model(torch.randn(8, 3))
    assert torch.is_grad_enabled()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
