"""`tilewright serve`: a model behind OpenAI's interface."""

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.draft import DraftModelOption, DraftTokensOption, load_draft
from tilewright.cli.options import DeviceOption, KeyFileOption, device, key, need
from tilewright.cli.prepare import QuantizeOption, check, prepare
from tilewright.errors import UsageError


def serve_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face model folder, or FILE.py:FACTORY, with a tokenizer.")
    ],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[
        str | None, typer.Option("--name", help="The model's name for clients; default: the folder's.")
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Answer only clients with this key.")] = None,
    api_key_file: KeyFileOption = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Sequences of one step.")] = 64,
    max_context: Annotated[
        int | None, typer.Option("--max-context", min=2, help="Tokens of a prompt and its answer; default: up to 8192.")
    ] = None,
    cache_tokens: Annotated[
        int | None, typer.Option("--cache-tokens", min=16, help="Tokens that the cache holds; default: what fits.")
    ] = None,
    max_waiting: Annotated[int, typer.Option("--max-waiting", min=1, help="Open requests; more get a 429.")] = 1024,
    fp8: Annotated[bool, typer.Option("--fp8", help="Linear layers in float8, on a GPU.")] = False,
    quantize: QuantizeOption = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=FOLDER", help="A LoRA adapter, for requests whose model is NAME."),
    ] = None,
    draft_model: DraftModelOption = None,
    num_draft_tokens: DraftTokensOption = 4,
    device_name: DeviceOption = None,
) -> None:
    """Serve completions and chats with `tilewright.Engine`, patched on a GPU, until a signal ends it."""
    need("serve", "fastapi", "uvicorn", "prometheus_client")
    place = device(device_name)
    check(place, fp8=fp8, quantize=quantize)
    api_key = key(api_key, api_key_file)
    adapters = _adapters(adapter or [])
    from tilewright import Engine
    from tilewright.assistant import load
    from tilewright.serve import serve

    with redirect_stdout(sys.stderr):
        loaded = load.load(model, device=place)
        if loaded.tokenizer is None:
            raise UsageError(f"{model} has no tokenizer, so text cannot be read.")
        prepare(loaded.model, place, fp8=fp8, quantize=quantize)
        draft = load_draft(draft_model, loaded.tokenizer, place, fp8=fp8)
    with Engine(
        loaded.model,
        loaded.tokenizer,
        max_batch=max_batch,
        max_context=max_context,
        cache_tokens=cache_tokens,
        draft_model=draft,
        num_draft_tokens=num_draft_tokens,
        adapters=adapters,
    ) as engine:
        seconds = engine.warmup()
        print(f"ready after {seconds:.0f} s of captures: http://{host}:{port}", file=sys.stderr, flush=True)
        serve(engine, name or Path(model).name, host=host, port=port, api_key=api_key, max_waiting=max_waiting)


def _adapters(texts: list[str]) -> dict[str, str]:
    """Folders of adapters by name."""
    adapters: dict[str, str] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not name or not folder or name in adapters:
            raise UsageError(f"--adapter {text}: needs NAME=FOLDER, and every name once.")
        adapters[name] = folder
    return adapters
