"""Flops, bytes and live memory of one eager forward, by module, counted at the level of aten ops.

`CostMode` sees every op after autograd has decomposed composite ops. Bytes are counted twice on purpose: `bytes_eager`
is what the eager ops move (each reads its inputs, writes its outputs), `bytes_ideal` what a module that fuses
everything inside would move (its inputs, parameters and outputs once). The gap between them is what fusion can win.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from tilewright.assistant.observation.attribution import around_modules

aten = torch.ops.aten

# Position of the left operand.
_MATMUL_AT = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}


@dataclass(frozen=True)
class Matmul:
    """One matrix product: (M, K) @ (K, N), `batch` times."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str


@dataclass(frozen=True)
class Attention:
    """One scaled_dot_product_attention: q (B, H, S_q, D), k and v (B, H_kv, S_kv, D)."""

    batch: int
    heads: int
    kv_heads: int
    s_q: int
    s_kv: int
    dim: int
    dtype: str
    causal: bool


@dataclass
class ModuleCost:
    """Costs of one module over one forward; without its children's, but for `peak_bytes` and `bytes_ideal_*`."""

    path: str
    module_class: str
    calls: int = 0
    ops: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_ideal_read: int = 0
    bytes_ideal_written: int = 0
    peak_bytes: int = 0  # most bytes alive above those alive when the module was entered
    matmuls: list[Matmul] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)

    @property
    def bytes_eager(self) -> int:
        """Bytes that the module's own ops move."""
        return self.bytes_read + self.bytes_written


@dataclass
class Costs:
    """All modules in call order, and the peak of the whole forward above its start."""

    modules: list[ModuleCost]
    peak_bytes: int

    @property
    def flops(self) -> int:
        """Flops of the whole forward."""
        return sum(module.flops for module in self.modules)


def count(model: nn.Module, run: Any) -> Costs:
    """Costs of one `run()` of `model`, an eager forward. Takes a Python call per op on top of it."""
    mode = CostMode()
    with torch.no_grad(), around_modules(model, mode.entering), ideal_bytes(model, mode), mode:
        run()
    return Costs(list(mode.by_path.values()), mode.top)


class CostMode(TorchDispatchMode):
    """Adds each op to the module that is innermost when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.by_path: dict[str, ModuleCost] = {}
        self.stack: list[ModuleCost] = []
        self.live = 0
        self.top = 0
        self._marks: list[tuple[int, int]] = []  # (live at entry, peak since) of each open module
        self._known: set[int] = set()

    @contextmanager
    def entering(self, path: str, module: nn.Module) -> Iterator[None]:
        """Around one call of one module."""
        cost = self.by_path.setdefault(path, ModuleCost(path, type(module).__name__))
        cost.calls += 1
        self.stack.append(cost)
        self._marks.append((self.live, self.live))
        try:
            yield
        finally:
            self.stack.pop()
            entered, peak = self._marks.pop()
            cost.peak_bytes = max(cost.peak_bytes, peak - entered)
            if self._marks:
                before, outer = self._marks[-1]
                self._marks[-1] = (before, max(outer, peak))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        cost = self.stack[-1] if self.stack else self.by_path.setdefault("", ModuleCost("", "(outside)"))
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _moves_nothing(inputs, outputs, func):
            return out
        cost.ops += 1
        cost.flops += _flops(func, args, kwargs, out)
        read, written = _traffic(func, inputs, outputs)
        cost.bytes_read += read
        cost.bytes_written += written
        if func._overloadpacket in _MATMUL_AT:
            cost.matmuls.append(_matmul(func, args))
        elif _is_attention(func):
            cost.attentions.append(_attention(func, args, kwargs))
        for tensor in outputs:
            self._alive(tensor)
        return out

    def _alive(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.live += size
        self.top = max(self.top, self.live)
        if self._marks:
            entered, peak = self._marks[-1]
            self._marks[-1] = (entered, max(peak, self.live))
        weakref.finalize(storage, self._dead, key, size)

    def _dead(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@contextmanager
def ideal_bytes(model: nn.Module, mode: CostMode) -> Iterator[None]:
    """While open, adds what each module reads and writes at its border, and its parameters, to `bytes_ideal_*`."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        cost = mode.stack[-1]
        # An embedding or another table look-up reads rows, not its whole weight: never more than it hands out.
        written = sum(_bytes(t) for t in tree_leaves(output) if isinstance(t, Tensor))
        parameter_bytes = sum(_bytes(p) for p in module.parameters(recurse=False))
        cost.bytes_ideal_read += sum(_bytes(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        cost.bytes_ideal_read += min(parameter_bytes, written) if isinstance(module, nn.Embedding) else parameter_bytes
        cost.bytes_ideal_written += written

    handles = [module.register_forward_hook(hook, with_kwargs=True, prepend=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _moves_nothing(inputs: list[Tensor], outputs: list[Tensor], func: Any) -> bool:
    """Views and metadata: every output shares its storage with an input, and the op does not write in place."""
    if func._schema.is_mutable:
        return False
    storages = {t.untyped_storage()._cdata for t in inputs}
    return all(t.untyped_storage()._cdata in storages for t in outputs)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    if _is_attention(func):  # torch's table lacks the CPU kernel, and counts no grouped queries in some versions
        (batch, heads, s_q, d_qk), s_kv, d_v = args[0].shape, args[1].shape[2], args[2].shape[3]
        return int(2 * batch * heads * s_q * s_kv * (d_qk + d_v))
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _traffic(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[int, int]:
    written = sum(_bytes(t) for t in outputs)
    if func._overloadpacket in (aten.embedding, aten.index_select, aten.gather):
        return written, written
    return sum(_bytes(t) for t in inputs), written


def _matmul(func: Any, args: Any) -> Matmul:
    first = _MATMUL_AT[func._overloadpacket]
    a, b = args[first], args[first + 1]
    return Matmul(
        a.shape[-2], b.shape[-1], a.shape[-1], a.shape[0] if a.dim() == 3 else 1, str(a.dtype).removeprefix("torch.")
    )


def _is_attention(func: Any) -> bool:
    name = func._overloadpacket.__name__
    return "scaled_dot_product" in name and "backward" not in name


def _attention(func: Any, args: Any, kwargs: Any) -> Attention:
    q, k = args[:2]
    names = [argument.name for argument in func._schema.arguments]
    position = names.index("is_causal") if "is_causal" in names else len(args)
    causal = bool(args[position] if position < len(args) else kwargs.get("is_causal", False))
    batch, heads, s_q, dim = q.shape
    return Attention(batch, heads, k.shape[1], s_q, k.shape[2], dim, str(q.dtype).removeprefix("torch."), causal)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
