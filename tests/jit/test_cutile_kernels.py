"""Every cuTile kernel computes what its op's reference computes, run block by block in an emulation of the language.

What a GPU adds, layouts, masks of whole vectors, approximate instructions, is compiled in tests/compile and run in
tests/gpu.  Here are the index arithmetic, the masks, the rounding points and the host code that calls the kernels.
"""

import pytest
import torch
from tests.harness.cutile_emulation import emulated

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contract, contracts, implementations, record
from tilewright.ops.rows import RowsBucket

IMPLEMENTATIONS = [
    (op.op, op.direction)
    for c in contracts().values()
    for op in c.raw_ops
    if "cutile" in implementations(op.op, op.direction)
]
CASES = [
    (name, direction, w)
    for name, direction in IMPLEMENTATIONS
    for w in contract(name).edge_cases
    if 0 not in w.params.values()  # without elements nothing is launched
]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-5}
LARGE = 6000  # elements; larger cases run with one configuration
LACKING = ("programs", "no gate_multiplier", "needs a weight")  # refusals of masks and options that cuTile has not


def raw_call(name, direction, workload, dtype):
    """(raw op, its arguments), as the public function makes them."""
    subject = contract(name)
    sample = subject.inputs(workload.params, dtype, torch.device("cpu"), 7)
    with record() as notes:
        subject.function(*sample.args, backend="torch", **sample.kwargs)
    ((op, args, _, _),) = notes.calls
    if direction == "fwd":
        return op, args
    gradient = subject.gradient
    outputs = op.reference(*args)  # all of them; the public function may keep some for itself
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(8)
    grads = tuple(torch.randn(o.shape, generator=generator).to(o.dtype) for o in outputs)
    plain = tuple(None if isinstance(a, torch.Tensor) else a for a in args)
    needs = tuple(isinstance(a, torch.Tensor) for a in args)
    return gradient.op, gradient.raw_args(grads, gradient.save(args, outputs), plain, needs)


def agree(op, args, config):
    """Launch into poisoned outputs and compare each with the reference's."""
    implementation = implementations(op.op, op.direction)["cutile"]
    expected = op.reference(*args)
    outs = op.allocate(args, "cpu")
    for out in outs:
        out.fill_(1e4)
    with emulated():
        implementation.launch(outs, *args, config=config)
    for out, want in zip(outs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        limit = max(TOLERANCE[out.dtype], TOLERANCE[args[0].dtype])
        torch.testing.assert_close(out, want, rtol=limit, atol=limit, equal_nan=True, msg=lambda m: f"{config}: {m}")


def shape_of(config):
    """What of a configuration the kernel itself sees; warps and occupancy are tileiras' business."""
    return tuple(v for name, v in config._asdict().items() if name not in ("num_warps", "occupancy"))


def name_of(value):
    return value if isinstance(value, str) else value.name.partition(":")[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize(("name", "direction", "workload"), CASES, ids=name_of)
def test_edge_case(name, direction, workload, dtype):
    op, args = raw_call(name, direction, workload, dtype)
    implementation = implementations(op.op, op.direction)["cutile"]
    if implementation.supports is not None and (refused := implementation.supports(*args)):
        # every case runs in one dtype at least, but for what cuTile lacks
        assert dtype == torch.float32 or any(lacking in refused for lacking in LACKING), refused
        return
    bucket = op.bucket_of(args, "default")
    configs = [implementation.configure(bucket, dtype)]
    if args[0].numel() <= LARGE and dtype == torch.bfloat16:
        configs += implementation.candidates(bucket, dtype)
    for config in {shape_of(config): config for config in configs}.values():
        agree(op, args, config)


@pytest.mark.parametrize(("rows", "split"), [(100, 0), (3, 1024)])
def test_softmax_of_rows_longer_than_registers(rows, split):
    from tilewright.ops.reduction.kernels.cutile.softmax import configure

    op, _ = raw_call("softmax", "fwd", contract("softmax").edge_cases[0], torch.float32)
    config = configure(RowsBucket(rows, 40001), torch.float32)
    assert bool(config.split) == bool(split)
    x = torch.randn(2, 40001, generator=torch.Generator().manual_seed(0))
    x[1, ::3] = -torch.inf
    agree(op, (x,), config)


def test_a_position_outside_the_table_shows_as_nan():
    from tilewright.ops.rope.apply_rope.args import RopeBucket
    from tilewright.ops.rope.kernels.cutile.rope import configure

    op, _ = raw_call("apply_rope", "fwd", contract("apply_rope").edge_cases[0], torch.float32)
    q, k = torch.ones(1, 2, 4, 8), torch.ones(1, 1, 4, 8)
    table = torch.ones(5, 8)
    positions = torch.tensor([[0, 5, -1, 4]])
    outs = op.allocate((q, k, table, table, positions, False, 0), "cpu")
    implementation = implementations("apply_rope", "fwd")["cutile"]
    with emulated():
        implementation.launch(
            outs, q, k, table, table, positions, False, 0, config=configure(RopeBucket(4, 2, 1, 8, 8), q.dtype)
        )
    assert outs[0].isnan().all(-1).tolist() == [[[False, True, True, False]] * 2]


def test_a_kernel_that_promises_no_masks_and_needs_one_fails_in_the_emulation():
    from tilewright.ops.norm.kernels.cutile.rms_norm import Config, _forward

    x = torch.ones(3, 8)
    with emulated(), pytest.raises(IndexError, match="reaches 3 of 3"):
        _forward((2,), (x, x, x, x, 1e-6, 0.0, torch.ones(8)), (False, False, 2, 8, True), Config(2, 4))
