"""`tilewright <verb>`: thin commands over the library.  Each prints for people, and writes JSON with `--json FILE`
(`-`: stdout).

Wrong input prints one line and exits with code 2; a failed check, bench or optimisation exits with code 1.
"""

import sys

import typer

from tilewright.cli import bench, doctor, model, op
from tilewright.errors import TilewrightError
from tilewright.log import configure

app = typer.Typer(
    name="tilewright",
    help="Verified GPU operators behind one dispatch, and an assistant that makes PyTorch models fast and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (doctor, op, bench, model):
    module.add(app)


def main() -> None:
    """Entry point of the console script."""
    try:
        configure()
        app()
    except (TilewrightError, ValueError) as error:
        if not isinstance(error, TilewrightError) and not str(error).startswith("TILEWRIGHT_"):
            raise
        print(f"tilewright: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
