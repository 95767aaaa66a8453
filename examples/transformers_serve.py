"""`transformers serve` with our kernels: its command line, its continuous batching, each model patched as it is loaded.

    pip install 'tilewright[hf]' 'transformers[serving]'
    python examples/transformers_serve.py path/to/model --continuous-batching --port 8000

All options are those of `transformers serve`.  Its own list of attention implementations has no names of others, so
ours is set by the patch, and continuous batching finds it as "paged|tilewright".
"""

from typing import Any

import typer
from transformers.cli import serve
from transformers.cli.serving import model_manager

import tilewright
from tilewright.models.attention import register_attention


class PatchedModels(model_manager.ModelManager):
    """The models that a server has loaded."""

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super()._load_model(*args, **kwargs).eval()
        tilewright.patch(model)
        model.set_attn_implementation(register_attention())
        return model


def main() -> None:
    """Serve until a signal."""
    model_manager.ModelManager = PatchedModels
    command = typer.Typer()
    command.command()(serve.Serve)
    command()


if __name__ == "__main__":
    main()
