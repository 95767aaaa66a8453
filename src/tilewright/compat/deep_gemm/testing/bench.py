"""Times of a call in seconds, as DeepGEMM's tests take them.

For a comparison use `tilewright bench`: it interleaves the contestants and gives intervals. Without a GPU the same code
times the CPU.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from tilewright.errors import InputError
from tilewright.hardware import device_info
from tilewright.log import logger

_LEAD_SIZE = 8192  # a float32 product of this size takes a GPU at least ten milliseconds
_SHOWN = 8  # kernels listed in a message
_DEEP_GEMM_KERNELS = (  # names that programs written for DeepGEMM search
    "bf16_gemm",
    "fp8_gemm",
    "gemm_",
    "bmn_bnk_mn_gemm_impl",
    "m_grouped_bf16_gemm_contiguous_tl_impl",
    "b_fused_k_grouped_bf16_gemm_contiguous_tl_impl",
    "pack_fp32_into_ue8m0",
)
_GENERAL = ("gemm", "nvjet", "transpose")  # such programs search these too; a kernel here may have such a name or not
_FLUSH = "bitwise_not"  # part of the flushing kernel's name, unlikely in that of a timed kernel


def bench(fn: Callable[[], object], num_warmups: int = 5, num_tests: int = 10, high_precision: bool = False) -> float:
    """Seconds a call, from events around `num_tests` calls in a row; the L2 is flushed before the first only.

    high_precision: enqueue a long product first, so that the GPU does not wait for launches.
    """
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
        _flush_buffer().zero_()
    for _ in range(num_warmups):
        fn()
    if not gpu:
        start = time.perf_counter()
        for _ in range(num_tests):
            fn()
        return (time.perf_counter() - start) / num_tests
    if high_precision:
        lead = torch.randn(_LEAD_SIZE, _LEAD_SIZE, device="cuda")
        lead @ lead
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_tests):
        fn()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / num_tests


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    with_multiple_kernels: bool = False,
    barrier: Callable[[], object] | None = None,
) -> float | tuple[float, ...]:
    """Mean seconds of the kernels whose names contain `kernel_names`, from torch's profiler; a tuple for a tuple.

    Names of DeepGEMM's kernels ("bf16_gemm", "fp8_gemm", "gemm_") stand for all kernels that a call launches here; so
    do "gemm", "nvjet" and "transpose" if one of them is the only name and no kernel's name contains it. Another name
    that no kernel contains gives 0, and a warning that lists the kernels. On a CPU the names are those of torch's
    operators ("aten::mm"), their times without the operators they call.

    suppress_kineto_output: discard the process's output meanwhile. trace_path: write a Chrome trace there.
    flush_l2: overwrite four times the L2 before each call. with_multiple_kernels: a name may match several kernels, and
    the mean is over all their launches; otherwise that raises InputError, which is an AssertionError too.
    barrier: called before each call of `fn`, for programs of several processes; its kernels are counted if their names
    match.
    """
    names = kernel_names if isinstance(kernel_names, tuple) else (kernel_names,)
    buffer = _flush_buffer() if flush_l2 else None
    fn()
    with _silence() if suppress_kineto_output else nullcontext():
        profiler = _profiled(fn, num_tests, buffer, barrier)
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    kernels = _kernels(profiler)
    times = tuple(
        sum(seconds for seconds, _ in kernels.values()) / num_tests
        if _is_whole(name, len(names), kernels)
        else _mean_seconds(name, kernels, with_multiple_kernels)
        for name in names
    )
    return times if isinstance(kernel_names, tuple) else times[0]


class AmbiguousNameError(InputError, AssertionError):
    """Several kernels match where one is expected; programs written for DeepGEMM catch AssertionError."""


def _is_whole(name: str, count: int, kernels: Iterable[str]) -> bool:
    """True if the name, one of `count`, stands for all kernels of a call."""
    if name in _DEEP_GEMM_KERNELS:
        return True
    return count == 1 and name in _GENERAL and not any(name in kernel for kernel in kernels)


def _profiled(
    fn: Callable[[], object], num_tests: int, buffer: torch.Tensor | None, barrier: Callable[[], object] | None
) -> Any:
    """A profile of `num_tests` calls, after `num_tests` calls of warm-up."""
    gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU
    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[activity], schedule=plan, acc_events=True) as profiler:
        for _ in range(2):
            for _ in range(num_tests):
                if buffer is not None:
                    buffer.bitwise_not_()
                if barrier is not None:
                    barrier()
                fn()
            if gpu:
                torch.cuda.synchronize()
            profiler.step()
    return profiler


def _kernels(profiler: Any) -> dict[str, tuple[float, int]]:
    """Total seconds and launches by kernel name, or by operator on a CPU, without the flushing."""
    gpu = torch.cuda.is_available()
    kernels: dict[str, tuple[float, int]] = {}
    for event in profiler.events():
        on_device = event.device_type == (DeviceType.CUDA if gpu else DeviceType.CPU)
        if on_device and not event.is_user_annotation and _FLUSH not in event.name:
            us = event.time_range.elapsed_us() if gpu else event.self_cpu_time_total
            seconds, launches = kernels.get(event.name, (0.0, 0))
            kernels[event.name] = seconds + us / 1e6, launches + 1
    return kernels


def _mean_seconds(name: str, kernels: dict[str, tuple[float, int]], several: bool) -> float:
    matches = [kernel for kernel in kernels if name in kernel]
    if not matches:
        longest = sorted(kernels, key=lambda kernel: -kernels[kernel][0])[:_SHOWN]
        logger.warning("bench_kineto: no kernel's name contains %r; seen: %s", name, ", ".join(longest) or "none")
        return 0.0
    if len(matches) > 1 and not several:
        raise AmbiguousNameError(
            f"bench_kineto: {name!r} is in the names of {len(matches)} kernels: {', '.join(matches[:_SHOWN])}. "
            "Give a longer part of one name, or with_multiple_kernels=True."
        )
    return sum(kernels[kernel][0] for kernel in matches) / sum(kernels[kernel][1] for kernel in matches)


def _flush_buffer() -> torch.Tensor:
    """A buffer of four times the L2; writing it evicts the operands from L2."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.empty(4 * device_info(device).l2_bytes, dtype=torch.uint8, device=device)


@contextmanager
def _silence() -> Iterator[None]:
    """Redirect the process's standard output and error to devnull, those of C++ libraries too."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, 1)
        os.dup2(devnull, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved[0], 1)
        os.dup2(saved[1], 2)
        for descriptor in (devnull, *saved):
            os.close(descriptor)
