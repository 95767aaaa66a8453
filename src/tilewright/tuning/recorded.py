"""A recorded call as a problem to tune: tensors of the same sizes, strides and alignment, with data of the tuner's own.

Operands are drawn anew: numbers of 8 bits, and floats of the call's dtype that have a gradient (all of them, where the
op has none).  Other tensors (indices, positions, masks, scales, tables of angles) keep the recorded data, because
kernels rely on what these mean.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from tilewright.dispatch import Contract, Cost, RawOp, Sample, call
from tilewright.dispatch.contract import Direction
from tilewright.errors import InputError
from tilewright.log import logger

LARGEST_DATA = 16 << 20
"""Bytes of a tensor whose data are kept; they travel to the workers with every request."""
_ALIGNMENT = 16  # bytes: what layouts in buckets distinguish


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its memory.   offset: elements from an aligned address.   data: bytes to keep; None: drawn."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    data: bytes | None

    @property
    def extent(self) -> int:
        """Elements from the first to the last, gaps included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last."""
        return self.extent * self.dtype.itemsize

    def tensor(self, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """A tensor of this form; without a generator its elements are undefined."""
        memory = torch.empty(self.offset + self.extent, dtype=self.dtype, device=device)
        if generator is not None and self.extent:
            if self.data is None:
                memory.copy_(_drawn(len(memory), self.dtype, generator))
            else:
                memory[self.offset :].copy_(torch.frombuffer(bytearray(self.data), dtype=self.dtype))
        return memory.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class RecordedCall:
    """The arguments of one call of a forward raw op, with a `TensorForm` for each tensor: plain data."""

    args: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(leaf.nbytes for leaf in tree_leaves(self.args) if isinstance(leaf, TensorForm))

    def on(self, device: torch.device | str, seed: int | None = None) -> tuple[Any, ...]:
        """The arguments on `device`, drawn from `seed`; None leaves the memory undefined, as for fake tensors."""
        place = torch.device(device)
        generator = None if seed is None else torch.Generator(place).manual_seed(seed)
        return tree_map(lambda leaf: leaf.tensor(place, generator) if isinstance(leaf, TensorForm) else leaf, self.args)


def recorded_call(contract: Contract, args: Sequence[Any]) -> RecordedCall:
    """The form of `args`, those of the op's forward.  Raises InputError for data that is too large to be kept."""
    dtype = contract.forward.dtype_of(args)
    operands = range(len(args)) if contract.gradient is None else contract.gradient.inputs

    def form(i: int, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        narrow = leaf.element_size() == 1 and leaf.dtype != torch.bool
        return _form(leaf, narrow or (i in operands and leaf.dtype == dtype and leaf.is_floating_point()))

    return RecordedCall(tuple(tree_map(partial(form, i), arg) for i, arg in enumerate(args)))


def cost_of(raw: RawOp, recorded: RecordedCall) -> Cost:
    """Bytes of the tensors, and the flops that torch counts in the reference."""
    args = recorded.on("meta")
    written = sum(t.nbytes for t in raw.allocate(args, torch.device("meta")))
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            raw.reference(*args)
        flops = int(counter.get_total_flops())
    except (RuntimeError, NotImplementedError) as error:  # a reference that reads data has none to read here
        logger.debug("%s: its flops are not counted: %s", raw.key, error)
        flops = 0
    return Cost(flops, recorded.nbytes, written)


class _OnRawArguments(Contract):
    """A contract whose public function takes the arguments of the raw op."""

    @property
    def function(self) -> Callable[..., Any]:
        """The call as the public function makes it, once its own arguments have become the raw op's."""

        def function(*args: Any, backend: str | None = None, out: Tensor | None = None) -> Any:
            return call(self, args, backend, out)

        return function


def on_raw_arguments(contract: Contract, recorded: RecordedCall) -> Contract:
    """The forward of `contract` as an op of its own, whose only inputs are those of `recorded`."""

    def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
        return Sample(recorded.on(device, seed))

    def cost(sample: Sample, direction: Direction) -> Cost:
        return cost_of(contract.forward, recorded)

    values = {each.name: getattr(contract, each.name) for each in fields(Contract)}
    values |= {"reference": contract.forward.reference, "inputs": inputs, "cost": cost, "gradient": None}
    return _OnRawArguments(**values)


def _form(t: Tensor, drawn: bool) -> TensorForm:
    offset = int(t.storage_offset()) % max(1, _ALIGNMENT // t.element_size())
    form = TensorForm(tuple(t.shape), tuple(t.stride()), t.dtype, offset, None)
    if drawn:
        return form
    if form.nbytes > LARGEST_DATA:
        raise InputError(
            f"a {t.dtype} of {tuple(t.shape)} holds {form.nbytes >> 20} MiB of data, more than the tuner keeps "
            f"({LARGEST_DATA >> 20} MiB)."
        )
    elements = t.detach().as_strided((form.extent,), (1,), t.storage_offset())
    data = elements.contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return TensorForm(form.shape, form.stride, form.dtype, form.offset, data)


def _drawn(count: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator, device=generator.device).to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, (count,), generator=generator, device=generator.device).to(dtype)
