"""tilewright: verified GPU operators with one dispatch, and an assistant that makes PyTorch models fast and proves it.

    from tilewright import ops              ops.rms_norm(x, weight), ops.swiglu(gate, up), ...
    patch = tilewright.patch(model)         our ops inside a Hugging Face model; patch.undo()
    opt = tilewright.optimize(model, inputs)   measure, change, verify, report
    engine = tilewright.Engine(model)       many requests at once over a paged cache; engine.generate(prompts)

Everything is imported on first use: `import tilewright` itself loads no compiler and touches no GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewright.version import __version__ as __version__

if TYPE_CHECKING:
    from tilewright import mask, ops, settings
    from tilewright.assistant import analyze, optimize
    from tilewright.bench.calibrate import calibrate
    from tilewright.dispatch import (
        explain,
        get_current_backend,
        numerics,
        record,
        register_impl,
        set_backend,
        use_backend,
    )
    from tilewright.engine import Engine
    from tilewright.models import patch, quantize_
    from tilewright.tuning.own_kernels import tune

_HOME = {
    "Engine": "tilewright.engine",
    "analyze": "tilewright.assistant",
    "optimize": "tilewright.assistant",
    "calibrate": "tilewright.bench.calibrate",
    "patch": "tilewright.models",
    "quantize_": "tilewright.models",
    "tune": "tilewright.tuning.own_kernels",
    **dict.fromkeys(
        (
            "explain",
            "get_current_backend",
            "numerics",
            "record",
            "register_impl",
            "set_backend",
            "use_backend",
        ),
        "tilewright.dispatch",
    ),
}
_MODULES = (
    "bench",
    "compat",
    "dispatch",
    "distributed",
    "engine",
    "errors",
    "generate",
    "hardware",
    "mask",
    "models",
    "nn",
    "ops",
    "optim",
    "serve",
    "settings",
    "tuning",
    "validate",
    "warmup",
)

__all__ = [
    "Engine",
    "analyze",
    "calibrate",
    "explain",
    "get_current_backend",
    "mask",
    "numerics",
    "ops",
    "optimize",
    "patch",
    "quantize_",
    "record",
    "register_impl",
    "set_backend",
    "settings",
    "tune",
    "use_backend",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import_module("tilewright.ops")  # most of these look up ops by name
        value = getattr(import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = import_module(f"tilewright.{name}")
    else:
        raise AttributeError(f"module 'tilewright' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
