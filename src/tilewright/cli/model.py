"""`tilewright analyze | optimize`: the assistant."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.op import DeviceOption
from tilewright.cli.output import JsonOption, check_writable, parse_dtype
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.assistant import Report

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A Hugging Face model folder, or FILE.py:FACTORY returning (module, inputs)."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option("--prompts", help='Texts to judge on: .jsonl of {"text": ...}, or plain text, blank lines between.'),
]
GoalOption = Annotated[str, typer.Option("--goal", help="latency: one request; throughput: a batch of them.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", help="Write one self-contained page to this file.")]
TokensOption = Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens generated in each timed request.")]
AllowOption = Annotated[
    str | None, typer.Option("--allow", help="Changes to consider, separated by commas; default: all.")
]


def add(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("analyze")(analyze_model)
    app.command("optimize")(optimize_model)


def analyze_model(
    model: ModelArgument,
    prompts: PromptsOption = None,
    goal: GoalOption = "latency",
    new_tokens: TokensOption = 32,
    allow: AllowOption = None,
    device: DeviceOption = None,
    html: HtmlOption = None,
    json_file: JsonOption = None,
) -> None:
    """Say where a model's time goes, how far that is from this machine's ceilings, and what is worth trying."""
    _run("analyze", model, prompts, goal, device, html, json_file, allow=_names(allow), new_tokens=new_tokens)


def optimize_model(
    model: ModelArgument,
    prompts: PromptsOption = None,
    goal: GoalOption = "latency",
    new_tokens: TokensOption = 32,
    allow: AllowOption = None,
    budget: Annotated[float | None, typer.Option("--budget", min=1, help="Seconds to aim at.")] = None,
    accept_dtype: Annotated[
        str | None,
        typer.Option("--accept-dtype", help="bf16: accept the rounding of that type, so a cast may be kept."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of sampled inputs.")] = 0,
    device: DeviceOption = None,
    html: HtmlOption = None,
    json_file: JsonOption = None,
) -> None:
    """Make a model faster: try one change at a time, keep what is measured faster and verified accurate, undo the
    rest.
    """
    options = {"allow": _names(allow), "new_tokens": new_tokens, "budget_s": budget}
    _run(
        "optimize", model, prompts, goal, device, html, json_file,
        **options, accept_dtype=parse_dtype(accept_dtype), seed=seed,
    )  # fmt: skip


def _run(
    verb: str,
    name: str,
    prompts: Path | None,
    goal: str,
    device: str | None,
    html: Path | None,
    json_file: str | None,
    **options: Any,
) -> None:
    check_writable(html, json_file)
    from rich.console import Console

    from tilewright import assistant
    from tilewright.assistant import load, terminal

    texts = None if prompts is None else load.load_prompts(prompts)
    loaded = load.load(name, device=device)
    if texts is not None and loaded.tokenizer is None:
        raise UsageError(f"--prompts: {name} has no tokenizer, so texts cannot be read.")
    console = Console(stderr=json_file == "-")
    with terminal.progress(Console(stderr=True)) as say:
        made = getattr(assistant, verb)(
            loaded.model, loaded.inputs, goal=goal, prompts=texts, tokenizer=loaded.tokenizer, progress=say, **options
        )
    report: Report = made if verb == "analyze" else made.report
    terminal.show(report, console)
    _save(report, html, json_file, console)


def _save(report: "Report", html: Path | None, json_file: str | None, console: Any) -> None:
    if json_file == "-":
        json.dump(json.loads(report.to_json()), sys.stdout, indent=1)
    elif json_file is not None:
        Path(json_file).parent.mkdir(parents=True, exist_ok=True)
        Path(json_file).write_text(report.to_json(), encoding="utf-8")
    if html is not None:
        from tilewright.assistant.html import render

        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(render(report), encoding="utf-8")
        console.print(f"The report: {html.resolve()}", soft_wrap=True, highlight=False)


def _names(allow: str | None) -> list[str] | None:
    return allow.split(",") if allow else None
