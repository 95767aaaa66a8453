"""An op whose candidates have every virtue and every vice: double(x) = 2x.  Workers import this module by its name."""

import os
import signal
import time
from typing import Any, NamedTuple

import torch
from tests.harness.simulated_time import SimulatedTime
from torch import Tensor

from tilewright.bench import clock, timing
from tilewright.dispatch import (
    Contract,
    Cost,
    Gradient,
    RawOp,
    Sample,
    Workload,
    call,
    dispatch,
    register,
    register_impl,
)
from tilewright.jit.collect import collecting

NAME = "test_tuned_double"


class Config(NamedTuple):
    kind: str
    passes: int = 1  # over the data: what makes a candidate slow


PASS_S = 4e-4  # on a CPU, by the clock of the bench
SIMULATED = "SIMULATE_THE_BENCH_CLOCK"  # "1": a worker, which imports this module, times with a simulated clock
if os.environ.get(SIMULATED) == "1":
    timing.time = clock.time = SimulatedTime()

DEFAULT = Config("right", 50)
FAST = Config("right", 1)
CANDIDATES = (
    Config("right", 250), Config("wrong"), Config("partial"), Config("outside"), Config("hangs"), FAST,
    Config("crashes"), Config("raises"), Config("spills"), Config("compiler_hangs"), Config("writes_input"),
)  # fmt: skip


@dispatch(NAME)
def double(x: Tensor, *, out: Tensor | None = None, backend: str | None = None) -> Tensor:
    """2x."""
    return call(CONTRACT, (x,), backend, out)


def reference(x: Tensor) -> Tensor:
    """2x."""
    return 2 * x


class Args(NamedTuple):
    x: Tensor  # (M, N)


class BackwardArgs(NamedTuple):
    dy: Tensor  # (M, N)


class Bucket(NamedTuple):
    M: int
    N: int


FORWARD = RawOp(
    NAME,
    "fwd",
    Args,
    package="tests.tuning.no_such_package",
    outputs=lambda args: ((args.x.shape, args.x.dtype),),
    reference=lambda args: reference(args.x),
    bucket=lambda args: Bucket(*args.x.shape),
    bucket_names=Bucket._fields,
    out=True,
)
BACKWARD = RawOp(
    NAME,
    "bwd",
    BackwardArgs,
    package="tests.tuning.no_such_package",
    outputs=lambda args: ((args.dy.shape, args.dy.dtype),),
    reference=lambda args: reference(args.dy),
    bucket=lambda args: Bucket(*args.dy.shape),
    bucket_names=Bucket._fields,
)


def _inputs(params: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    x = torch.randn(params["M"], params["N"], generator=torch.Generator().manual_seed(seed))
    x[0] *= params.get("loud", 1)
    return Sample((x.to(device, dtype),))


CONTRACT = register(
    Contract(
        name=NAME,
        family="test",
        summary="2x",
        reference=reference,
        forward=FORWARD,
        check=lambda args: None,
        inputs=_inputs,
        cost=lambda sample, direction: Cost(0, sample.args[0].nbytes, sample.args[0].nbytes),
        workloads=(Workload("only", {"M": 64, "N": 4096}, (torch.float32,)),),
        cpu_workloads=(Workload("only", {"M": 64, "N": 4096}, (torch.float32,)),),
        edge_cases=(),
        bad_inputs=(),
        gradient=Gradient(
            BACKWARD, inputs=("x",), save=lambda args, outputs: (), raw_args=lambda grads, saved, args, needs: grads
        ),
    )
)


class _Artifact(NamedTuple):
    info: dict[str, Any]


def _compile(config: Config) -> _Artifact:
    if config.kind == "compiler_hangs":
        time.sleep(600)
    return _Artifact({"spills": 24 if config.kind == "spills" else 0})


def options(*candidates: Config, backend: str = "cpu") -> dict[str, Any]:
    """What an implementation is registered with."""
    return {
        "backend": backend,
        "configure": lambda bucket, dtype: DEFAULT,
        "config_type": Config,
        "candidates": lambda bucket, dtype: candidates,
    }


@register_impl(NAME, **options(*CANDIDATES))
@register_impl(NAME, direction="bwd", **options(FAST))
@register_impl(NAME, **options(Config("faults"), FAST, backend="triton"))  # for GPU tensors
def launch(outs: tuple[Tensor], x: Tensor, *, config: Config) -> None:
    collector = collecting()
    if collector is not None:
        collector.add("double_kernel", lambda: _compile(config))  # type: ignore[arg-type]
        return
    (out,) = outs
    if config.kind == "hangs":
        time.sleep(600)
    if config.kind == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if config.kind == "raises":
        raise ValueError("no such tile")
    if config.kind == "faults":
        x.flatten()[torch.full((1,), 1 << 40, device=x.device)]
    rows = slice(None, -1 if config.kind == "partial" else None)
    for _ in range(config.passes):
        if x.device.type == "cpu":
            timing.time.sleep(PASS_S)
        torch.mul(x[rows], 3 if config.kind == "wrong" else 2, out=out[rows])
    if config.kind == "quiet_row" and x.shape[0] > 50:
        out[50] = 0
    beyond = out.untyped_storage().nbytes() - 4 * (out.storage_offset() + out.numel())
    if config.kind == "outside" and beyond:
        out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(7)
    if config.kind == "writes_input":
        x.zero_()
