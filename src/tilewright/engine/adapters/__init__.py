"""LoRA adapters of an engine: their files, and their products beside a model's linear layers."""

from tilewright.engine.adapters.files import Source
from tilewright.engine.adapters.layers import Adapters

__all__ = ["Adapters", "Source"]
