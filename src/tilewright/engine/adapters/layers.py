"""LoRA adapters: low-rank products beside the linear layers of a model, others for every row of a step.

To y = x @ W.T an adapter adds s * (x @ A.T) @ B.T, with A (r, K) and B (N, r).  The factors of all adapters lie side by
side, A (R, K) and B (N, R), R the sum of their ranks, so two products serve all rows of a step; between them a row
keeps the columns of its own adapter, times s, and has 0 in place of others.  No weight of the model changes, and its
code is as before: hooks of its layers add, while the engine computes a step that has adapters.
Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.engine.adapters.files import Factors, Source, factors
from tilewright.errors import InputError


class _Layer(NamedTuple):
    """a: (R, K)   b: (N, R)   scales: (adapters + 1, R) float32, 0 in columns of others; row 0 is that of none."""

    a: Tensor
    b: Tensor
    scales: Tensor


class Adapters:
    """Adapters of one model, numbered from 1 in the order of `names`."""

    def __init__(self, model: nn.Module, sources: Mapping[str, Source]) -> None:
        """sources: by name.   Raises InputError for what `factors` refuses, and where a layer does not fit."""
        self.names = tuple(sources)
        every = {name: factors(name, source) for name, source in sources.items()}
        paths = dict.fromkeys(path for its in every.values() for path in its)  # in order
        self._layers = {
            path: _layer(model, path, [its.get(path) for its in every.values()], self.names) for path in paths
        }
        self._tokens: Tensor | None = None
        self._pending: set[str] = set()
        self._hooks = [
            model.get_submodule(path).register_forward_hook(partial(self._add, path)) for path in self._layers
        ]

    def number(self, name: str | None) -> int:
        """The number of the adapter `name`; 0 for None.   Raises InputError for a name that is not known."""
        if name is not None and name not in self.names:
            raise InputError(
                f"Engine: no adapter is named {name!r}; this engine has {', '.join(self.names) or 'none'}."
            )
        return 0 if name is None else 1 + self.names.index(name)

    @contextmanager
    def applied(self, tokens: Tensor) -> Iterator[None]:
        """Layers called inside add the adapters of their rows.   tokens: (T,) int64, the number of each row's adapter.

        Raises InputError if a layer with adapters was not called: its product was computed by another module.
        """
        self._tokens, self._pending = tokens, set(self._layers)
        try:
            yield
        finally:
            self._tokens = None
        if self._pending:
            raise InputError(
                f"Engine: {min(self._pending)} has an adapter, and its product was computed without a call of that "
                "layer, as by a float8 patch or a cache of latents. Patch the model without that, or merge the adapter."
            )

    def close(self) -> None:
        """Leave the model's layers as they were."""
        for hook in self._hooks:
            hook.remove()

    def _add(self, path: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """The hook of one layer: x (1, T, K), output (1, T, N)."""
        if self._tokens is None:
            return None
        (x,), layer = inputs, self._layers[path]
        if x.shape[:-1] != (1, len(self._tokens)):
            raise InputError(f"Engine: {path} has an adapter, and does not compute a row for each token of a step.")
        self._pending.discard(path)
        scales = layer.scales[self._tokens]
        columns = torch.where(scales == 0, 0, F.linear(x, layer.a) * scales)  # (1, T, R)
        return output + F.linear(columns.to(x.dtype), layer.b)


def _layer(model: nn.Module, path: str, each: list[Factors | None], names: tuple[str, ...]) -> _Layer:
    """The factors of one layer side by side, with nothing for adapters that leave it as it is."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if not isinstance(module, nn.Linear):
        raise InputError(f"Engine: an adapter changes {path}, which is no linear layer of this model.")
    for name, its in zip(names, each, strict=True):
        size = module.out_features, module.in_features
        if its is not None and (its.b.shape[0], its.a.shape[1]) != size:
            raise InputError(
                f"Engine: adapter {name!r} has factors of {its.b.shape[0]} x {its.a.shape[1]} for {path}; the layer "
                f"is {size[0]} x {size[1]}."
            )
    present = [its for its in each if its is not None]
    scales, start = torch.zeros(1 + len(each), sum(its.a.shape[0] for its in present)), 0
    for number, its in enumerate(each, 1):
        if its is not None:
            scales[number, start : start + its.a.shape[0]] = its.scale
            start += its.a.shape[0]
    a = torch.cat([its.a.detach().to(module.weight) for its in present])
    b = torch.cat([its.b.detach().to(module.weight) for its in present], 1)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise InputError(f"Engine: an adapter has factors for {path} that are not finite in {module.weight.dtype}.")
    return _Layer(a, b, scales.to(module.weight.device))
