"""Find the inputs of an op for a bucket: sizes of a declared workload, changed until they fall into it.

A bucket is made of sizes, but not all of its fields are sizes of a workload: attention's BH is B * H.  So the search
tries values, and the bucket of the result says whether they are right.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from tilewright.dispatch import Contract, RawOp, Workload, contract
from tilewright.dispatch.contract import Direction
from tilewright.errors import InputError
from tilewright.tuning.problem import Problem, fake_call, modules_of

_STARTS = 6  # workloads nearest to the bucket from which the search goes on
_STEPS = 4  # sizes that it changes in each

Found = tuple[Workload, torch.dtype]


def workload_of(
    raw: RawOp, bucket: tuple[int, ...], dtype: torch.dtype, device: torch.device, seconds: float
) -> Found | None:
    """A workload, and its dtype, whose call of `raw` has this bucket and dtype; None where none was found in time."""
    try:
        subject = contract(raw.op)
    except InputError:  # a raw op without a public function of its name
        return None
    if raw not in subject.raw_ops:
        return None
    search = _Search(subject, raw, bucket, dtype, device, time.monotonic() + seconds)
    nearest: list[tuple[int, int, Workload, torch.dtype]] = []
    for workload, each in search.templates():
        misses = search.misses(workload, each)
        if misses == []:
            return workload, each
        if misses is not None:
            nearest.append((len(misses), len(nearest), workload, each))
    for _, _, workload, each in sorted(nearest, key=lambda start: start[:2])[:_STARTS]:
        reached = search.walk(workload, each)
        if reached is not None:
            return reached, each
    return None


class _Search:
    def __init__(
        self,
        subject: Contract,
        raw: RawOp,
        bucket: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        end: float,
    ) -> None:
        self._contract, self._raw, self._bucket = subject, raw, tuple(bucket)
        self._dtype, self._device, self._end = dtype, device, end
        self._modules = modules_of(subject, device.type)
        self._seen: dict[tuple[str, torch.dtype], tuple[int, ...] | None] = {}

    @property
    def direction(self) -> Direction:
        """The direction of the raw op."""
        return "fwd" if self._raw.direction == "fwd" else "bwd"

    def templates(self) -> Iterator[Found]:
        """Workloads with the bucket's own sizes where they have such names, then as they are declared."""
        sizes = dict(zip(self._raw.bucket_names, self._bucket, strict=True))
        declared = (self._contract.workloads, self._contract.cpu_workloads)
        if self._device.type == "cpu":
            declared = declared[::-1]
        for workload in (*declared[0], *declared[1], *self._contract.edge_cases):
            if self.direction not in workload.directions:
                continue
            first = (self._dtype,) if self._dtype in self._contract.dtypes else ()
            named = {name: sizes[name] for name, old in workload.params.items() if name in sizes and _int(old)}
            for dtype in dict.fromkeys((*first, *workload.dtypes)):
                yield _with(workload, named), dtype
                yield _with(workload, {}), dtype

    def misses(self, workload: Workload, dtype: torch.dtype) -> list[int] | None:
        """Positions of the bucket's fields that are others; None for sizes that do not fit together."""
        got = self._bucket_of(workload.params, dtype)
        return None if got is None else [i for i, value in enumerate(got) if value != self._bucket[i]]

    def walk(self, workload: Workload, dtype: torch.dtype) -> Workload | None:
        """Change one size after the other, each time the one that brings the bucket nearest."""
        for _ in range(_STEPS):
            misses = self.misses(workload, dtype)
            if not misses:
                return workload if misses == [] else None
            steps = [_with(workload, {name: value}) for name, value in self._steps(workload.params, dtype, misses)]
            scored = [(len(left), i) for i, s in enumerate(steps) if (left := self.misses(s, dtype)) is not None]
            if not scored or min(scored)[0] >= len(misses):
                return None
            workload = steps[min(scored)[1]]
        return workload if self.misses(workload, dtype) == [] else None

    def _steps(self, params: Mapping[str, Any], dtype: torch.dtype, misses: list[int]) -> Iterator[tuple[str, int]]:
        got = self._bucket_of(params, dtype)  # seen before, by `misses`
        assert got is not None
        for name, old in params.items():
            if not _int(old):
                continue
            values: list[int] = []
            for i in misses:
                is_, due = got[i], self._bucket[i]
                values.append(due)
                if is_ > 0 and due > 0:
                    values += [old * due // is_, old * is_ // due]
            yield from ((name, value) for value in dict.fromkeys(values) if value > 0 and value != old)

    def _bucket_of(self, params: Mapping[str, Any], dtype: torch.dtype) -> tuple[int, ...] | None:
        key = (repr(sorted(params.items())), dtype)
        if key not in self._seen and time.monotonic() > self._end:
            return None
        if key not in self._seen:
            problem = Problem(self._contract.name, self.direction, params, dtype, str(self._device), 0, self._modules)
            try:
                with fake_call(problem) as call:
                    fits = call.raw.dtype_of(call.args) == self._dtype
                    self._seen[key] = tuple(call.raw.bucket_of(call.args, "default")) if fits else None
            except (ValueError, RuntimeError, TypeError, IndexError, AssertionError):
                self._seen[key] = None  # sizes that do not fit together: inputs and references raise what they like
        return self._seen[key]


def _with(workload: Workload, sizes: Mapping[str, int]) -> Workload:
    return replace(workload, name="first call", params={**workload.params, **sizes})


def _int(value: Any) -> bool:
    return type(value) is int
