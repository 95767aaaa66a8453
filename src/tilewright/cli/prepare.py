"""How `tilewright generate` and `tilewright serve` make a model fast: linear layers in fewer bits, and patches."""

from typing import Annotated, Any

import typer

from tilewright.errors import UsageError

QuantizeOption = Annotated[
    str | None,
    typer.Option("--quantize", metavar="FORMAT", help="Linear layers in int4, int8, mxfp4, ..., as quantize_ does it."),
]


def check(device: str, *, fp8: bool, quantize: str | None) -> None:
    """Raise UsageError for options that exclude each other, InputError for an unknown format."""
    if fp8 and device == "cpu":
        raise UsageError("--fp8 needs a GPU.")
    if quantize is None:
        return
    if fp8:
        raise UsageError("--fp8 and --quantize exclude each other; give one.")
    from tilewright.models.quantise import check_format

    check_format("--quantize", quantize, calibrated=False)


def prepare(model: Any, device: str, *, fp8: bool, quantize: str | None) -> None:
    """Quantise a model, and patch it on a GPU."""
    from tilewright import patch, quantize_

    if quantize is not None:
        quantize_(model, quantize)
    if device.startswith("cuda"):
        patch(model, fp8=fp8)
