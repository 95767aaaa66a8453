"""Forward passes that are wrong in one way each.  Plain torch, so that every machine can show they are caught."""

from typing import Any

import torch
from tests.validate.broken.planted import MEMORY, correct, fault
from torch import Tensor

from tilewright.dispatch import contract

REFERENCE = contract("rms_norm").reference


@fault("eager", quiet=False, fools_allclose=True, dtype=torch.float16)
def wrong_tile(outs: tuple[Tensor], *args: Any, config: None) -> None:
    """One tile of twelve is off by half a percent."""
    correct(outs, *args, config=config)
    outs[0][64:128, 128:192] *= 1.005


@fault("eager", quiet=False, fools_allclose=True, dtype=torch.float16)
def wrong_row(outs: tuple[Tensor], *args: Any, config: None) -> None:
    """The last row, and only it, is off by half a percent."""
    correct(outs, *args, config=config)
    outs[0][-1] *= 1.005


@fault("eager", quiet=False, fools_allclose=False, params={"M": 8, "N": 333})
def missing_tail_mask(outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, *_: Any, config: None) -> None:
    """The sum of squares runs to the end of the block, into the next row."""
    m, n = x.shape
    block = 1 << (n - 1).bit_length()
    padded = torch.cat([x.flatten(), x.new_ones(block)]).float()
    mean = padded.as_strided((m, block), (n, 1)).square().sum(-1, keepdim=True) / n
    outs[0].copy_(weight * (x.float() * torch.rsqrt(mean + eps)).to(x.dtype))


@fault("poison", fools_allclose=True)
def stale_output(outs: tuple[Tensor], *args: Any, config: None) -> None:
    """The last 64 columns are not written; memory that held an earlier result looks right."""
    outs[0][:, :-64] = contract("rms_norm").forward.reference(*args)[:, :-64]


@fault("poison", quiet=False, fools_allclose=False)
def unwritten_workspace(outs: tuple[Tensor], x: Tensor, *args: Any, config: None) -> None:
    """Adds a workspace that was never cleared."""
    correct(outs, x, *args, config=config)
    outs[0].add_(torch.empty_like(x) + 1)


@fault("inputs_unchanged", fools_allclose=True)
def mutated_input(outs: tuple[Tensor], x: Tensor, *args: Any, config: None) -> None:
    """The result is right; x was used as scratch on the way."""
    correct(outs, x, *args, config=config)
    x[0] *= 2


@fault("eager", quiet=False, fools_allclose=False)
def nan(outs: tuple[Tensor], *args: Any, config: None) -> None:
    """One element is NaN, to which any comparison of the form `error > limit` says no."""
    correct(outs, *args, config=config)
    outs[0][3, 5] = torch.nan


@fault("non_contiguous", fools_allclose=True)
def wrong_stride(outs: tuple[Tensor], x: Tensor, *args: Any, config: None) -> None:
    """Rows are taken to lie one after the other, whatever x.stride(0) says."""
    correct(outs, x.as_strided(x.shape, (x.shape[-1], 1), x.storage_offset()), *args, config=config)


@fault("offset", fools_allclose=True)
def assumed_alignment(outs: tuple[Tensor], x: Tensor, *args: Any, config: None) -> None:
    """Loads start at the aligned address below x."""
    start = x.storage_offset() // 8 * 8
    correct(outs, x.as_strided(x.shape, x.stride(), start), *args, config=config)


@fault("determinism", fools_allclose=True)
def non_deterministic(outs: tuple[Tensor], *args: Any, config: None) -> None:
    """One element is rounded up or down by chance, as an atomic sum would."""
    correct(outs, *args, config=config)
    outs[0].view(torch.int16)[0, 0] += (torch.rand(()) > 0.5).short()  # one bf16 step


@fault("batch_invariance", fools_allclose=True, dtype=torch.float32)
def batch_variant(outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, *_: Any, config: None) -> None:
    """Large batches sum a row in another order than small ones."""
    squares = x.square()
    parts = 1 if x.shape[0] < 64 else 16
    total = squares.view(x.shape[0], x.shape[1] // parts, parts).sum(1).sum(-1, keepdim=True)
    outs[0].copy_(weight * (x * torch.rsqrt(total / x.shape[-1] + eps)))


@fault("guard_bands", fools_allclose=True)
def out_of_bounds(outs: tuple[Tensor], *args: Any, config: None) -> None:
    """The last block is stored whole, over the end.  Plain torch can only reach what shares the output's storage."""
    correct(outs, *args, config=config)
    (y,) = outs
    end = y.storage_offset() + y.numel()
    beyond = min(64, y.untyped_storage().nbytes() // y.element_size() - end)
    y.as_strided((beyond,), (1,), end).zero_()


@fault("changed_inputs", fools_allclose=True)
def cached_by_pointer(outs: tuple[Tensor], x: Tensor, *args: Any, config: None) -> None:
    """The result of an earlier call is kept by address, which is fast and wins benchmarks."""
    known = MEMORY.get(x.data_ptr())
    if known is None or known.shape != x.shape or known.dtype != x.dtype:
        correct(outs, x, *args, config=config)
        MEMORY.clear()
        MEMORY[x.data_ptr()] = outs[0].clone()
    else:
        outs[0].copy_(known)


@fault("autocast", fools_allclose=True, dtype=torch.float32)
def follows_autocast(outs: tuple[Tensor], x: Tensor, weight: Tensor, eps: float, *_: Any, config: None) -> None:
    """The mean is a matrix product, which autocast turns into bf16."""
    mean = x.square() @ torch.full((x.shape[-1], 1), 1 / x.shape[-1])
    outs[0].copy_(weight * (x * torch.rsqrt(mean.float() + eps)))
