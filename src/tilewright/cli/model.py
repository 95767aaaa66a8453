"""`tilewright analyze | optimize`: the assistant."""

import sys
from contextlib import redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.options import DeviceOption, Dtype, JsonOption, device, names, need, torch_dtype
from tilewright.cli.output import check_writable, write, write_json
from tilewright.errors import UsageError

if TYPE_CHECKING:
    from tilewright.assistant import Report


class Goal(StrEnum):
    """What should become fast."""

    latency = "latency"
    throughput = "throughput"


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A Hugging Face model folder, or FILE.py:FACTORY returning (module, inputs)."),
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Texts to judge accuracy on: .jsonl of {"text": ...}, or text with blank lines between.',
    ),
]
GoalOption = Annotated[Goal, typer.Option("--goal", help="Speed of one request, or of a batch of them.")]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write the report to FILE, one self-contained page.")
]
TokensOption = Annotated[int, typer.Option("--new-tokens", min=1, help="Tokens generated in each timed request.")]
AllowOption = Annotated[
    str | None,
    typer.Option("--allow", metavar="NAMES", help="Only try these changes, separated by commas; default: all."),
]


def analyze_model(
    model: ModelArgument,
    prompts: PromptsOption = None,
    goal: GoalOption = Goal.latency,
    new_tokens: TokensOption = 32,
    allow: AllowOption = None,
    device_name: DeviceOption = None,
    html: HtmlOption = None,
    json_file: JsonOption = None,
) -> None:
    """Say where a model's time goes, how far that is from this machine's ceilings, and what is worth trying."""
    _run("analyze", model, prompts, device_name, html, json_file, goal=goal, new_tokens=new_tokens, allow=allow)


def optimize_model(
    model: ModelArgument,
    prompts: PromptsOption = None,
    goal: GoalOption = Goal.latency,
    new_tokens: TokensOption = 32,
    allow: AllowOption = None,
    budget: Annotated[
        float | None, typer.Option("--budget", min=1, help="Wall time to aim at, in seconds; default: 100.")
    ] = None,
    accept_dtype: Annotated[
        Dtype | None,
        typer.Option("--accept-dtype", help="Accept the rounding of this dtype, so that a cast to it may be kept."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sample that accuracy is judged on.")] = 0,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="DIR", help="Write the weights, and optimized.py, which applies the kept changes."
        ),
    ] = None,
    device_name: DeviceOption = None,
    html: HtmlOption = None,
    json_file: JsonOption = None,
) -> None:
    """Make a model faster: try one change at a time, keep what is measured faster and verified accurate, undo the
    rest.
    """
    settings: dict[str, Any] = {"budget_s": budget, "accept_dtype": torch_dtype(accept_dtype), "seed": seed}
    settings |= {"goal": goal, "new_tokens": new_tokens, "allow": allow}
    _run("optimize", model, prompts, device_name, html, json_file, folder=save, **settings)


def _run(
    verb: str,
    name: str,
    prompts: Path | None,
    device_name: str | None,
    html: Path | None,
    json_file: str | None,
    *,
    goal: Goal,
    allow: str | None,
    folder: Path | None = None,
    **options: Any,
) -> None:
    check_writable(html, json_file, None if folder is None else folder / "optimized.py")
    if html is not None:
        need("report", "jinja2", "matplotlib")
    place = device(device_name)
    from rich.console import Console

    from tilewright import assistant
    from tilewright.assistant import inputs, load
    from tilewright.assistant.changes import chosen
    from tilewright.assistant.view import terminal
    from tilewright.hardware import ceilings

    changes = chosen(names(allow))
    if ceilings.load(place) is None:
        check_writable(ceilings.path_for(place))  # they are measured on the way
    texts = None if prompts is None else load.load_prompts(prompts)
    # what a factory or a model prints must not mix with the JSON
    with terminal.progress(Console(stderr=True)) as say, redirect_stdout(sys.stderr):
        loaded = load.load(name, device=place)
        if texts is not None and loaded.tokenizer is None:
            raise UsageError(f"--prompts: {name} has no tokenizer, so texts cannot be read.")
        made_inputs = None
        if texts is None and loaded.inputs is None:
            made_inputs = inputs.make(loaded.model, loaded.tokenizer)
            say(made_inputs.note)
        result = getattr(assistant, verb)(
            loaded.model,
            loaded.inputs if made_inputs is None else made_inputs.inputs,
            goal=goal.value,
            prompts=texts if made_inputs is None else made_inputs.prompts,
            tokenizer=loaded.tokenizer,
            changes=changes,
            progress=say,
            **options,
        )
    report: Report = result if verb == "analyze" else result.report
    if made_inputs is not None:
        report.notes.insert(0, made_inputs.note)
    console = Console(stderr=json_file == "-")
    terminal.show(report, console)
    write_json(report.to_json(), json_file)
    if folder is not None:
        source = "" if Path(name).is_dir() else name
        files = assistant.save(result, folder, source=source, tokenizer=loaded.tokenizer)
        console.print(f"Saved in {folder.resolve()}: {', '.join(files)}", soft_wrap=True, highlight=False)
    if html is not None:
        from tilewright.assistant.view.html import render

        write(html, render(report))
        console.print(f"The report: {html.resolve()}", soft_wrap=True, highlight=False)
