"""The generation engine: `tilewright.Engine` serves a Hugging Face decoder to many requests at once."""

from tilewright.engine.engine import Engine
from tilewright.engine.generation import Generation, Output, Piece
from tilewright.engine.grammar import Grammar
from tilewright.engine.params import SamplingParams

__all__ = ["Engine", "Generation", "Grammar", "Output", "Piece", "SamplingParams"]
