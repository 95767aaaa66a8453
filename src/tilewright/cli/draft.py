"""The draft model of `tilewright generate` and `tilewright serve`."""

from typing import Annotated, Any

import typer

from tilewright.cli.prepare import prepare

DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        metavar="MODEL",
        help="A smaller model with the same vocabulary, which drafts tokens that the model then verifies.",
    ),
]
DraftTokensOption = Annotated[
    int, typer.Option("--num-draft-tokens", min=1, help="Tokens that it drafts in one step, at most.")
]


def load_draft(name: str | None, tokenizer: Any, device: str, *, fp8: bool) -> Any:
    """The model that `--draft-model` names, patched on a GPU; None stays None.

    Raises UsageError where it cannot be opened, InputError where its tokenizer has another vocabulary.
    """
    if name is None:
        return None
    from tilewright.assistant import load
    from tilewright.engine.loading import check_draft_tokenizer

    loaded = load.load(name, device=device)
    check_draft_tokenizer(loaded.tokenizer, tokenizer)
    prepare(loaded.model, device, fp8=fp8, quantize=None)
    return loaded.model
