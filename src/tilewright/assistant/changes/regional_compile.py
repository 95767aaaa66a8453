"""torch.compile of each repeated block: one compilation serves all layers, in seconds instead of minutes.

Compiling the whole model traces every layer. Blocks of one class share their code, and Dynamo keys compiled code on it,
so compiling the block compiles once for all layers, unless something in a block differs from layer to layer. In Hugging
Face models one thing does: attention asks the cache for `layers[self.layer_idx]`, which Dynamo bakes in; eight layers
later it gives up. So a compiled block gets a view of the cache that knows only its own layer: the same structure for
all of them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from tilewright.assistant.changes.protocol import Risk, Scene, Verdict
from tilewright.assistant.observation.attribution import is_compiled
from tilewright.assistant.observation.observe import Phase
from tilewright.assistant.predict import Prediction, floor_us, per_op_us, predict, self_us
from tilewright.assistant.workload import Workload
from tilewright.errors import PatchError


class LayerView:
    """A cache as one layer sees it: `update` goes straight to that layer, all else to the whole cache."""

    def __init__(self, cache: Any, layer: Any) -> None:
        self.cache = cache
        self.layer = layer

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append to this layer; `layer_idx` is not looked at, so that no compiled code depends on it."""
        return self.layer.update(key_states, value_states, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


@dataclass(frozen=True)
class RegionalCompile:
    """Compile every block of the model's repeated block classes."""

    name: str = "regional_compile"
    why: str = "Inductor fuses a block's element-wise chains into few kernels, and one compilation serves all layers."
    source: str = "pytorch.org tutorial 'Reducing torch.compile cold start compilation time with regional compilation'"
    risk: Risk = "rounding"
    stage: int = 5
    preparation_s: float = 30.0  # two CPU cores, 5 blocks, empty cache: 19 s and, for new lengths, 9 s in verification

    def applies(self, scene: Scene) -> Verdict:
        repeated = dict(blocks(scene.model))
        if not repeated:
            return Verdict(False, "no block repeats: there is no nn.ModuleList with two or more modules of one class.")
        if scene.work.device.type == "cpu" and cxx() is None:
            return Verdict(
                False, "there is no C++ compiler (g++), which Inductor needs on a CPU. Install g++ or set CXX."
            )
        classes = sorted({type(block).__name__ for block in repeated.values()})
        return Verdict(True, f"{len(repeated)} blocks of {', '.join(classes)}.")

    def predict(self, scene: Scene) -> Prediction:
        paths = tuple(f"{path}." for path, _ in blocks(scene.model))

        def saving(phase: Phase) -> float:
            inside = [cost for cost in phase.costs if f"{cost.path}.".startswith(paths)]
            simple = [cost for cost in inside if not cost.matmuls and not cost.attentions]
            fused = sum(floor_us(cost, scene.ceilings, leaf=False) for cost in simple)
            launches = per_op_us(scene, phase) * sum(cost.ops for cost in simple)
            if scene.work.device.type == "cpu":  # the time of a module holds what its calls cost
                launches = 0.0
            return max(0.0, self_us(phase, simple) - fused) + launches

        return predict(
            scene,
            self.name,
            saving,
            "the time of the blocks' element-wise modules and their launches; matrix products stay.",
        )

    def apply(self, model: nn.Module, work: Workload) -> Compiled:
        repeated = list(blocks(model))
        if not repeated:
            raise PatchError(f"regional_compile: {type(model).__name__} has no repeated block.")
        for _, block in repeated:
            _compile(block)
        return Compiled([block for _, block in repeated])


class Compiled:
    """Blocks that run compiled. Compilation happens at their first calls."""

    def __init__(self, compiled: list[nn.Module]) -> None:
        self._blocks = compiled

    @property
    def detail(self) -> str:
        names = sorted({type(block).__name__ for block in self._blocks})
        return f"compiled {len(self._blocks)} x {', '.join(names)}"

    def undo(self) -> None:
        for block in self._blocks:
            block._compiled_call_impl = None


def blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every block that repeats: two or more of one class in an outermost nn.ModuleList."""
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in lists):
            continue
        names = [type(child) for child in module]
        repeated = [(f"{path}.{index}", child) for index, child in enumerate(module) if names.count(type(child)) > 1]
        if repeated:
            lists.append(path)
            yield from ((where, child) for where, child in repeated if not is_compiled(child))


def cxx() -> str | None:
    """The C++ compiler that Inductor would use."""
    preferred = os.environ.get("CXX")
    return next(
        (path for name in ([preferred] if preferred else ["g++", "clang++"]) if (path := shutil.which(name))), None
    )


def _compile(block: nn.Module) -> None:
    block.compile()
    layer = _layer_index(block)
    if layer is None:
        return
    compiled: Any = block._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        layers = getattr(cache, "layers", None)
        if layers is not None and len(layers) > layer and not getattr(cache, "offloading", False):
            kwargs["past_key_values"] = LayerView(cache, layers[layer])
        return compiled(*args, **kwargs)

    block._compiled_call_impl = call


def _layer_index(block: nn.Module) -> int | None:
    """The `layer_idx` that Hugging Face gives to each block's attention; None if the block has none, or several."""
    indices = {value for module in block.modules() if isinstance(value := getattr(module, "layer_idx", None), int)}
    return indices.pop() if len(indices) == 1 else None
