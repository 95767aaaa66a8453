"""Seeded problems for every op: which op, which model, which sizes, and whether they fit.

A problem depends on the seed, its op and its number among the problems of that op, and on nothing else: fewer problems
are the first of more, and problems of some ops are the same as among all ops.  Only `random()` of Python's generator is
read, the one method whose sequence Python promises for every version.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from tilewright.bench.cases import Case, known_contracts
from tilewright.dispatch import Contract, Workload
from tilewright.dispatch.contract import Direction
from tilewright.hardware.ceilings import dtype_name

FP8, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
ATTEMPTS = 20_000
TRAINING_ROWS = 64
TRAINED = 0.4
"""Share of backwards among the problems that training has."""


@dataclass(frozen=True)
class Model:
    """Sizes of one public model; 0 or False where it has no such part."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    source: str
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    rotary: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    qkv_bias: bool = False
    dense_mlp: bool = False
    gelu: bool = False
    encoder: bool = False

    def shrunk(self) -> Model:
        """The model at about a sixteenth of its width, for a CPU."""
        kv_heads = -(-self.kv_heads // 8)
        small = {
            name: -(-getattr(self, name) // 128) * 8
            for name in ("hidden", "intermediate", "vocab", "expert_intermediate", "q_lora", "kv_lora")
        }
        heads = kv_heads * max(self.heads // self.kv_heads // 2, 1)
        return replace(
            self, **small, heads=heads, kv_heads=kv_heads, experts=min(self.experts, 8), top_k=self.top_k and 2
        )


@dataclass(frozen=True)
class Limits:
    """What one problem may take.   us: of flops at `rates`, by dtype.   bytes_moved: of inputs and outputs together.

    shrunk: models at a sixteenth of their width.
    """

    us: float
    bytes_moved: int
    rates: Mapping[torch.dtype, float]
    shrunk: bool = False


GPU = Limits(8000.0, 2 << 30, {FP8: 900e6, BF16: 500e6, FP16: 500e6, FP32: 25e6})
"""Flops a microsecond: about what an H200 reaches."""
CPU = Limits(4000.0, 2 << 20, dict.fromkeys((FP8, BF16, FP16, FP32), 2e3), shrunk=True)


@dataclass(frozen=True)
class Sizes:
    """The answer of a recipe.   part: of the model, for the name.   elements: of all inputs and outputs.

    trained: whether training has this problem, so that its backward may be drawn.   into, peers: see `Workload` and
    `Case`.
    """

    part: str
    params: Mapping[str, Any]
    dtype: torch.dtype
    elements: int
    flops: float = 0.0
    trained: bool = False
    into: str | None = None
    peers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """One drawn row.   number: among the problems of its op."""

    op: str
    number: int
    seed: int
    model: str
    sizes: Sizes
    direction: Direction
    directions: tuple[Direction, ...] = field(repr=False)

    @property
    def name(self) -> str:
        """Name of its case, unique in its op over all seeds."""
        return f"s{self.seed}_{self.number:03d}_{self.model}_{self.sizes.part}"

    @property
    def params(self) -> dict[str, Any]:
        """Sizes and options as the contract understands them, and the seed."""
        return {**self.sizes.params, "seed": self.seed}

    def case(self) -> Case:
        """The problem as a case of the bench."""
        sizes = self.sizes
        workload = Workload(self.name, self.params, (sizes.dtype,), self.directions, sizes.into)
        return Case(known_contracts()[self.op], workload, sizes.dtype, self.direction, sizes.peers)

    def __str__(self) -> str:
        text = ",".join(f"{name}={_word(value)}" for name, value in self.sizes.params.items())
        return f"{self.op:<22} {self.name:<40} {dtype_name(self.sizes.dtype):<13} {self.direction}  {text}"


class Draw:
    """Choices from one seeded sequence."""

    def __init__(self, *seed: object) -> None:
        self._random = random.Random(" ".join(map(str, seed)))

    def below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        return int(self._random.random() * count)

    def between(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence[Any]) -> Any:
        """One of `items`."""
        return items[self.below(len(items))]

    def chance(self, share: float) -> bool:
        """True in this share of calls."""
        return self._random.random() < share

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        """`items` in another order."""
        rest = list(items)
        return [rest.pop(self.below(len(rest))) for _ in items]


Recipe = Callable[[Draw, Model], Sizes | None]
"""Sizes of one op for a model; None where the model has no such part."""


def models() -> list[Model]:
    """The models of the data file."""
    written = json.loads(Path(__file__).with_name("any_size_models.json").read_text())
    return [Model(**each) for each in written]


def problems(
    seed: int,
    count: int,
    recipes: Mapping[str, tuple[int, Recipe]],
    *,
    limits: Limits = GPU,
    ops: Collection[str] = (),
) -> list[Problem]:
    """The first `count` problems of `seed`; with `ops`, of these alone.

    recipes: by op, how often it is drawn beside others, and its recipe.
    """
    found: list[Problem] = []
    numbers: Counter[str] = Counter()
    known = known_contracts()
    for op in _ops(seed, recipes):
        if len(found) == count:
            break
        numbers[op] += 1
        if not ops or op in ops:
            found.append(_problem(known[op], recipes[op][1], seed, numbers[op], limits))
    return found


def _ops(seed: int, recipes: Mapping[str, tuple[int, Recipe]]) -> Iterator[str]:
    """Ops without end: each as often in a cycle as its weight, in an order of its own in every cycle."""
    cycle = [op for op in sorted(recipes) for _ in range(recipes[op][0])]
    draw = Draw(seed, "ops")
    while True:
        yield from draw.shuffled(cycle)


def _problem(contract: Contract, recipe: Recipe, seed: int, number: int, limits: Limits) -> Problem:
    draw = Draw(seed, contract.name, number)
    for _ in range(ATTEMPTS):
        model = draw.pick(_MODELS)
        sizes = recipe(draw, model.shrunk() if limits.shrunk else model)
        backward = draw.chance(TRAINED)
        if sizes is None:
            continue
        directions = _directions(contract, sizes)
        direction: Direction = "bwd" if backward and "bwd" in directions else "fwd"
        if not _fits(sizes, limits, direction):
            continue
        return Problem(contract.name, number, seed, model.name, sizes, direction, directions)
    raise AssertionError(f"{contract.name}: no problem of {ATTEMPTS} fits {limits}")


def _fits(sizes: Sizes, limits: Limits, direction: Direction) -> bool:
    """A backward takes 2.5 times the flops of its forward, and reads and writes twice as much."""
    more_flops, more_elements = (2.5, 2) if direction == "bwd" else (1.0, 1)
    flops, elements = more_flops * sizes.flops, more_elements * sizes.elements
    width = 4 if sizes.dtype == FP32 else 2
    return flops <= limits.us * limits.rates.get(sizes.dtype, 1e6) and width * elements <= limits.bytes_moved


def _directions(contract: Contract, sizes: Sizes) -> tuple[Direction, ...]:
    """Those that some declared workload of the op has, of these sizes."""
    declared = {direction for workload in contract.workloads for direction in workload.directions}
    trained = sizes.trained and contract.gradient is not None and sizes.dtype != FP8
    return ("fwd", "bwd") if trained and "bwd" in declared else ("fwd",)


def _word(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return str(value).replace(" ", "")


_MODELS = models()
MODEL_FIELDS = {each.name for each in fields(Model)}
