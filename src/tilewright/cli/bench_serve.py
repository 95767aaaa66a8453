"""`tilewright bench serve`: load on a server, and what its clients waited for."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright import __version__
from tilewright.cli.options import JsonOption, KeyFileOption, key, need
from tilewright.cli.output import check_writable, say, write_json
from tilewright.errors import UsageError


def bench_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server with OpenAI's interface: http://127.0.0.1:8000.")],
    requests: Annotated[int, typer.Option("--requests", min=1, help="How many requests.")] = 100,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="PER_S", help="Requests a second, a Poisson process; default: all at once."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Open requests, at most; default: no limit.")
    ] = None,
    prompt: Annotated[str, typer.Option("--prompt-tokens", metavar="N|N-M", help="Length of prompts.")] = "128",
    output: Annotated[str, typer.Option("--output-tokens", metavar="N|N-M", help="Length of answers.")] = "128",
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", min=1, help="Prompts are drawn from the tokens below this.")
    ] = 1000,
    seed: Annotated[int, typer.Option("--seed", help="Of arrivals, lengths and prompts.")] = 0,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="Of the requests.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos/--stop-at-eos", help="Ask for answers of the whole length.")
    ] = True,
    model: Annotated[str | None, typer.Option("--model", help="The model's name; default: the first one.")] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="The server's key.")] = None,
    api_key_file: KeyFileOption = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds for one request.")] = 600.0,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the distributions: .png or .svg.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Send requests of drawn tokens to a server, and report rates and percentiles of latencies.

    The exit code is 1 if no request was answered.
    """
    check_writable(json_file, plot_file)
    if plot_file is not None:
        need("report", "matplotlib")
        if plot_file.suffix not in (".png", ".svg"):
            raise UsageError(f"--plot {plot_file}: the name has to end in .png or .svg.")
    from tilewright.bench.load import Range, Workload, measure, summarise
    from tilewright.bench.load.plots import plot

    every = math.inf if rate is None else rate
    workload = Workload(requests, every, Range.parse(prompt), Range.parse(output), vocabulary, seed)

    def tell(ended: int) -> None:
        if ended % max(requests // 10, 1) == 0:
            say(f"{ended} of {requests} requests ended")

    name, records = measure(
        url,
        workload,
        model=model,
        api_key=key(api_key, api_key_file),
        concurrency=concurrency,
        timeout=timeout,
        temperature=temperature,
        ignore_eos=ignore_eos,
        progress=tell,
    )
    summary = summarise(records)
    load = asdict(workload) | {"rate": rate, "concurrency": concurrency, "temperature": temperature}
    result = {
        "tilewright": __version__,
        "url": url,
        "model": name,
        "workload": load,
        "summary": summary,
        "records": [asdict(record) for record in records],
    }
    write_json(json.dumps(result, indent=1), json_file)
    if plot_file is not None:
        plot(records, f"{name}, {requests} requests", plot_file)
    if json_file != "-":
        _show(name, summary)
    if not summary["answered"]:
        raise typer.Exit(1)


def _show(name: str, summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from tilewright.bench.load.summary import QUANTITIES

    measured = {key: summary[key] for key in QUANTITIES if summary[key] is not None}
    columns = list(next(iter(measured.values()), {}))
    table = Table("ms", *columns, title=f"{name}: {summary['answered']} of {summary['requests']} requests answered")
    for quantity, spread in measured.items():
        table.add_row(QUANTITIES[quantity], *(f"{spread[column]:.1f}" for column in columns))
    for column in table.columns[1:]:
        column.justify = "right"
    console = Console()
    console.print(table)
    rates = ("requests", "prompt_tokens", "output_tokens")
    console.print(
        f"in {summary['seconds']:.2f} s, each second: "
        + ", ".join(f"{summary[f'{rate}_per_second']:.1f} {rate.replace('_', ' ')}" for rate in rates),
        highlight=False,
    )
    for kind, each in summary["errors"].items():
        console.print(f"{each['count']} failed, {kind}: {each['example']}", markup=False, highlight=False)
