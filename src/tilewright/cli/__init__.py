"""`tilewright <verb>`: thin commands over the library.  Each prints text, and writes JSON with `--json FILE` (with `-`
JSON alone on stdout, progress on stderr).

Exit codes: 0 for success; 1 for a check, bench or verification that failed; 2 for wrong input, with one line on stderr
and nothing written; 130 for an interrupt.  Any other exception is a bug of ours and keeps its traceback.
"""

import logging
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tilewright import __version__
from tilewright.cli import bench, bench_serve, cache, doctor, generate, model, op, serve, tune, warmup
from tilewright.errors import TilewrightError, VerificationError

# What the parser raises.  Newer versions of typer have their own copy of click: take the base class, not an import
_ParserError: type[Any] = typer.BadParameter.__mro__[2]


class Commands(TyperGroup):
    """The commands, some of two words, with errors turned into exit codes."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command of the first two words, if there is one, or else that of the first."""
        words = " ".join(args[:2])
        return super().resolve_command(ctx, [words, *args[2:]] if words in self.commands else args)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run one command line and exit."""
        options["standalone_mode"] = False
        try:
            sys.exit(super().main(*args, **options))
        except TilewrightError as error:
            logging.getLogger("tilewright").debug("raised here", exc_info=error)
            _fail(str(error), 1 if isinstance(error, VerificationError) else 2)
        except _ParserError as error:
            command = getattr(error, "ctx", None) and error.ctx.command_path
            _fail(f"{error.format_message()} See `{command or 'tilewright'} --help`.", 2)
        except typer.Abort:
            _fail("interrupted.", 130)


def _fail(text: str, code: int) -> None:
    print(f"tilewright: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


app = typer.Typer(
    name="tilewright",
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Example: tilewright optimize path/to/model --html report.html",
)
for _name, _command, _example in (
    ("doctor", doctor.show_machine, "--json machine.json"),
    ("warmup", warmup.warm_up, "--suite norm --arch sm_90a --out kernels.zip"),
    ("calibrate", bench.calibrate_device, "--quick"),
    ("ops", op.list_ops, "--json -"),
    ("explain", op.explain_op, "rms_norm --case M=8,N=4096 --device cuda"),
    ("check", op.check_op, "rms_norm --case odd_n --backend triton"),
    ("bench", bench.bench_suite, "norm rms_norm --case M=8192,N=4096"),
    ("bench serve", bench_serve.bench_server, "http://127.0.0.1:8000 --rate 4 --prompt-tokens 64-512"),
    ("tune", tune.tune_ops, "path/to/model --budget 10m"),
    ("analyze", model.analyze_model, "path/to/model --prompts prompts.txt"),
    ("optimize", model.optimize_model, "model.py:factory --html report.html"),
    ("generate", generate.generate_text, 'path/to/model --prompt "Once upon a time"'),
    ("serve", serve.serve_model, "path/to/model --port 8000"),
):
    app.command(_name, epilog=f"Example: tilewright {_name} {_example}")(_command)

app.add_typer(cache.app, name="cache", epilog="Example: tilewright cache export kernels.zip --arch sm_90a")


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version, and exit.")] = False,
) -> None:
    """Verified GPU operators behind one dispatch, and an assistant that makes PyTorch models fast and proves it."""
    if version:
        print(f"tilewright {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        return
    from tilewright.log import configure

    configure()


def main() -> None:
    """Entry point of the console script."""
    app()
