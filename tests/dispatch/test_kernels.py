"""Several kernels are one backend: listed by module name, imported when considered, each with its own config."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, NamedTuple

import pytest
import torch
from torch import Tensor

from tilewright.dispatch import Implementation, RawOp, implementations, register_impl, unregister_impl
from tilewright.dispatch.arguments import Size, schema_of
from tilewright.dispatch.backends import backend_of
from tilewright.dispatch.options import options, runnable
from tilewright.dispatch.registry import joint_reason
from tilewright.dispatch.tables import table
from tilewright.dispatch.tables.configs import from_row, to_row
from tilewright.errors import InputError, RefusedError, TableError

KERNEL = """
from typing import NamedTuple
from tilewright.dispatch import register_kernel
from tests.dispatch import test_kernels as here

class Config(NamedTuple):
    {field}: int = {default}

@register_kernel(
    here.FORWARD,
    configure=lambda bucket, dtype: Config() if {serves} else None,
    config_type=Config,
    configs=(Config(),),
    candidates=lambda bucket, dtype: (Config(), Config(99)) if {serves} else (),
    why_not=lambda args: None if {takes} else "takes {words}",
    batch_invariant={invariant},
)
def launch(outs, args, config):
    here.LAUNCHED.append(("{name}", config))
    outs[0].copy_(args.x * args.factor)
"""
LAUNCHED: list[tuple[str, object]] = []
FORWARD: RawOp


class Args(NamedTuple):
    x: Tensor  # (M, N)
    more: Tensor | None
    factor: float


class Bucket(NamedTuple):
    M: int
    N: int


@pytest.fixture(scope="module", autouse=True)
def family(tmp_path_factory):
    """A package `house.kernels` with two kernels for a CPU: `few` takes up to 8 rows, `many` any number."""
    global FORWARD
    folder = tmp_path_factory.mktemp("family")
    texts = {
        "few": {"field": "tokens", "default": 1, "serves": "bucket.M <= 8", "takes": "args.x.shape[0] <= 8"},
        "many": {"field": "block", "default": 64, "serves": "True", "takes": "args.x.shape[1] < 100"},
    }
    words = {"few": "up to 8 rows", "many": "N < 100"}
    for name, values in texts.items():
        path = folder / "house_of_kernels" / "kernels" / "cpu" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(KERNEL.format(name=name, words=words[name], invariant=name != "few", **values))
    sys.path.insert(0, str(folder))
    FORWARD = RawOp(
        "test_house", "fwd", Args,
        package="house_of_kernels", kernels=("cpu.few", "cpu.many"),
        outputs=lambda args: ((args.x.shape, args.x.dtype),),
        reference=lambda args: args.x * args.factor,
        bucket=lambda args: Bucket(*args.x.shape), bucket_names=Bucket._fields, batch_fields=("M",), out=True,
    )  # fmt: skip
    yield
    sys.path.remove(str(folder))


def run(m: int, n: int = 4, backend: str = "auto", mode: str = "default") -> SimpleNamespace:
    LAUNCHED.clear()
    x = torch.randn(m, n)
    torch.testing.assert_close(FORWARD(x, None, 3.0, backend, mode), 3 * x)
    plan = FORWARD.plan((x, None, 3.0), backend, mode)
    return SimpleNamespace(plan=plan, ran=[name for name, _ in LAUNCHED])


def the_backend() -> Implementation:
    return implementations("test_house", "fwd")["cpu"]


def test_a_module_is_imported_when_its_backend_is_considered():
    assert "house_of_kernels.kernels.cpu.few" not in sys.modules
    assert list(implementations("test_house", "fwd")) == ["cpu"]
    assert "house_of_kernels.kernels.cpu.few" in sys.modules


@pytest.mark.parametrize("name", ["triton", "cutile", "cpu"])
def test_a_folder_bears_its_backends_name(name):
    assert backend_of(f"{name}.softmax") == name


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100", "sm120"])
def test_a_folder_of_an_nvidia_architecture_is_the_cuda_backend(name):
    assert backend_of(f"{name}.dense") == "cuda"


@pytest.mark.parametrize("name", ["sm_90", "sm90a", "cuda", "torch", "tritn"])
def test_no_other_folder_holds_kernels(name):
    """It would be a backend of that name, of which nothing says what it needs."""
    with pytest.raises(InputError, match=rf"no kernels lie in {name}/\. Allowed: sm<number>/, triton/, cutile/, cpu/"):
        backend_of(f"{name}.dense")


def test_the_first_kernel_that_serves_the_bucket_runs():
    assert (run(8).ran, run(8).plan.kernel, run(8).plan.backend) == (["few"], "cpu.few", "cpu")
    assert (run(9).ran, run(9).plan.kernel) == (["many"], "cpu.many")


def test_a_kernel_that_refuses_the_call_leaves_it_to_the_next():
    assert run(4, 200).ran == ["few"]  # which `many` refuses
    refused = run(16, 200)
    assert (refused.ran, refused.plan.backend) == ([], "torch")


def test_where_no_kernel_can_run_each_says_why():
    both = r"^test_house\[cpu\] cpu\.few: takes up to 8 rows; cpu\.many: takes N < 100 \(M=16,N=200, float32\)\. Sup"
    with pytest.raises(RefusedError, match=both):
        run(16, 200, "cpu!")
    args = torch.ones(16, 200), None, 3.0
    assert the_backend().supports(*args) == "cpu.few: takes up to 8 rows; cpu.many: takes N < 100"
    with pytest.raises(RefusedError, match=r"\[cpu\] cpu\.few: is not batch invariant; cpu\.many: takes N < 100 \(M="):
        run(4, 200, "cpu!", "batch_invariant")


def test_a_reason_that_kernels_share_is_told_once():
    few, many = the_backend().kernels
    last = replace(many, kernel="cpu.last")
    assert joint_reason((few, many, last), ("a", "b", "a")) == "cpu.few, cpu.last: a; cpu.many: b"
    assert joint_reason((few, many), ("a", "a")) == "a", "no kernel needs a name"
    assert joint_reason((few, many), ("a", None)) is None


def test_a_backend_is_an_option_with_the_kernels_that_can_run():
    asked = []

    def counting(kernel):
        return replace(kernel, supports=lambda *args: asked.append(kernel.kernel) or kernel.supports(*args))

    backend = the_backend()
    backend = replace(backend, kernels=tuple(map(counting, backend.kernels)))

    def option(m, n, numerics="default"):
        asked.clear()
        found = options(FORWARD, {"cpu": backend}, (torch.ones(m, n), None, 3.0), numerics)
        assert found["torch"] == (None, None), "the reference always can"
        return found["cpu"]

    assert option(4, 4) == (backend, None)
    assert asked == ["cpu.few", "cpu.many"], "each is asked once"
    assert option(16, 4).implementation.kernel == "cpu.many"
    assert option(4, 200).implementation.kernel == "cpu.few"
    assert option(4, 4, "batch_invariant").implementation.kernel == "cpu.many"
    assert option(16, 200) == (None, "cpu.few: takes up to 8 rows; cpu.many: takes N < 100")


def test_options_stand_in_static_order():
    backend = the_backend()
    backends = {name: replace(backend, backend=name) for name in ("cpu", "zebra", "cuda", "adder")}
    for args in ((torch.ones(4, 4), None, 3.0), (torch.ones(16, 200), None, 3.0)):
        assert list(options(FORWARD, backends, args, "default")) == ["zebra", "adder", "cuda", "cpu", "torch"]
    assert list(runnable(FORWARD, backends, args, "default")) == ["torch"]
    assert list(runnable(FORWARD, backends, (torch.ones(4, 4), None, 3.0), "default")) == [
        "zebra", "adder", "cpu", "torch",
    ]  # fmt: skip


def test_promises_are_those_of_each_kernel():
    assert run(4, mode="batch_invariant").ran == ["many"]
    assert run(4, 200, mode="batch_invariant").plan.backend == "torch"


def test_the_arguments_are_named_and_the_schema_is_inferred():
    assert FORWARD.schema == "Tensor x, Tensor? more, float factor"
    assert FORWARD.bucket_text(FORWARD.bucket_of((torch.ones(2, 3), None, 1.0), "default")) == "M=2,N=3"
    assert FORWARD.bucket_of((torch.ones(2, 3), None, 1.0), "batch_invariant") == Bucket(4096, 3)


def test_out_is_written():
    x, out = torch.randn(4, 5), torch.empty(4, 5)
    FORWARD.torch_out(x, None, 2.0, "cpu!", "default", out0=out)
    torch.testing.assert_close(out, 2 * x)


class Odd(NamedTuple):
    x: Tensor
    mapping: dict


class Late(NamedTuple):
    scale: float
    x: Tensor


class Every(NamedTuple):
    x: Tensor
    more: list[Tensor]
    rows: Size
    bits: int
    fast: bool
    mode: str
    out_dtype: torch.dtype


def test_schemas():
    wanted = "Tensor x, Tensor[] more, SymInt rows, int bits, bool fast, str mode, ScalarType out_dtype"
    assert schema_of(Every) == wanted
    assert Size == Annotated[int, "SymInt"]
    with pytest.raises(InputError, match=r"Odd\.mapping is annotated"):
        schema_of(Odd)
    with pytest.raises(InputError, match="tensor x follows scale"):
        schema_of(Late)


def test_a_row_names_the_kernel():
    backend = the_backend()
    few, many = backend.kernels
    for kernel in (few, many):
        (config,) = kernel.configs
        row = to_row(config, kernel.kernel)
        assert row["kernel"] == kernel.kernel
        assert from_row(backend, row, Bucket(4, 4), torch.float32) == config
        assert type(from_row(backend, row, Bucket(4, 4), torch.float32)) is kernel.config_type
        assert from_row(kernel, row, Bucket(4, 4), torch.float32) == config
    with pytest.raises(TableError, match=r"kernel is None; it has to be one of cpu\.few, cpu\.many"):
        from_row(backend, {"tokens": 1}, Bucket(4, 4), torch.float32)
    with pytest.raises(TableError, match=r"one of cpu\.few\."):
        from_row(few, {"kernel": "cpu.many", "block": 64}, Bucket(4, 4), torch.float32)
    with pytest.raises(TableError, match="unexpected keyword"):
        from_row(backend, {"kernel": "cpu.few", "block": 64}, Bucket(4, 4), torch.float32)


def test_a_measured_row_chooses_the_kernel(monkeypatch):
    row = table.Row(
        "test_house", "fwd", "M=4,N=4", "float32", "default", "cpu", {"kernel": "cpu.many", "block": 99},
        1.0, 0.0, None, "here", "2026-11-23", "test.json",
    )  # fmt: skip
    monkeypatch.setattr(table, "lookup", lambda *key: row if key[2] == "M=4,N=4" else None)
    FORWARD.forget_plans()
    measured = run(4)
    assert (measured.plan.kernel, measured.plan.config) == ("cpu.many", (99,))
    assert measured.ran == ["many"]
    FORWARD.forget_plans()


def test_the_space_holds_every_kernel_that_serves():
    backend = the_backend()
    modules = [type(config).__module__ for config in backend.space(Bucket(4, 4), None)]
    assert [module.rpartition(".")[2] for module in modules] == ["few", "few", "many", "many"]
    assert len(backend.space(Bucket(64, 4), None)) == 2


def test_a_registered_implementation_takes_the_place_of_all_kernels():
    @register_impl("test_house", backend="cpu")
    def launch(outs, x, more, factor, *, config):
        LAUNCHED.append(("other", config))
        outs[0].copy_(x * factor)

    try:
        assert run(4).ran == ["other"]
        assert run(4).plan.kernel == ""
    finally:
        unregister_impl("test_house", backend="cpu")
    assert run(4).ran == ["few"]
