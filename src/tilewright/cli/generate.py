"""`tilewright generate`: text of a model, as it comes."""

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from time import perf_counter
from typing import Annotated, Any

import typer

from tilewright.cli.draft import DraftModelOption, DraftTokensOption, load_draft
from tilewright.cli.options import DeviceOption, JsonOption, device
from tilewright.cli.output import check_writable, emit
from tilewright.cli.prepare import QuantizeOption, check, prepare
from tilewright.errors import UsageError


def generate_text(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face model folder, or FILE.py:FACTORY, with a tokenizer.")
    ],
    prompt: Annotated[
        str | None, typer.Option("--prompt", metavar="TEXT", help="What to continue; default: standard input.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message: apply the model's chat template.")
    ] = False,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also run the unchanged model's own generate, and say how fast each is.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens, at most.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0, help="0 takes the likeliest token.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0, max=1, help="Keep the likeliest tokens of this share.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Repeat the same draws.")] = None,
    fp8: Annotated[bool, typer.Option("--fp8", help="Linear layers in float8, on a GPU.")] = False,
    quantize: QuantizeOption = None,
    draft_model: DraftModelOption = None,
    num_draft_tokens: DraftTokensOption = 4,
    device_name: DeviceOption = None,
    json_file: JsonOption = None,
) -> None:
    """Continue a text with `tilewright.Engine`, patched on a GPU, and print it as it comes."""
    check_writable(json_file)
    place = device(device_name)
    check(place, fp8=fp8, quantize=quantize)
    text = sys.stdin.read() if prompt is None else prompt
    if not text:
        raise UsageError("the prompt is empty: give --prompt TEXT, or text on standard input.")
    from tilewright import Engine
    from tilewright.assistant import load
    from tilewright.engine import SamplingParams

    with redirect_stdout(sys.stderr):
        loaded = load.load(model, device=place)
    if loaded.tokenizer is None:
        raise UsageError(f"{model} has no tokenizer, so text cannot be read.")
    with redirect_stdout(sys.stderr):
        draft = load_draft(draft_model, loaded.tokenizer, place, fp8=fp8)
    tokens = _tokens(loaded.tokenizer, text, chat)
    params = SamplingParams(temperature, top_k, top_p, seed=seed, max_tokens=max_tokens)
    out = sys.stderr if json_file == "-" else sys.stdout
    report: dict[str, Any] = {"kind": "generate", "model": model, "device": place, "prompt_tokens": len(tokens)}
    if baseline:
        report["baseline"] = _baseline(loaded, tokens, params)
    with redirect_stdout(sys.stderr):
        prepare(loaded.model, place, fp8=fp8, quantize=quantize)
    config: Any = loaded.model.config
    room = min(config.get_text_config(decoder=True).max_position_embeddings, len(tokens) + max_tokens)
    with Engine(
        loaded.model,
        loaded.tokenizer,
        max_batch=1,
        max_context=room,
        draft_model=draft,
        num_draft_tokens=num_draft_tokens,
    ) as engine:
        engine.warmup()
        begin, first = perf_counter(), 0.0
        generation = engine.submit(tokens, params)
        for piece in generation:
            first = first or perf_counter() - begin
            print(piece.text, end="", flush=True, file=out)
        seconds = perf_counter() - begin
    print(file=out)
    output = generation.result()
    report |= {"output": {**asdict(output), "prompt": len(output.prompt)}}
    report["tokens_per_second"], report["first_token_ms"] = len(output.tokens) / seconds, 1e3 * first
    lines = [
        f"{len(output.tokens)} tokens, {report['tokens_per_second']:.1f} a second, the first after {1e3 * first:.0f} ms"
    ]
    if draft is not None:
        report |= {name: engine.statistics[name] for name in ("draft_tokens", "accepted_tokens")}
        lines.append(f"{report['accepted_tokens']} of {report['draft_tokens']} drafted tokens accepted")
    if baseline:
        lines.append(f"the unchanged model: {report['baseline']['tokens_per_second']:.1f} tokens a second")
    print(*lines, sep="\n", file=sys.stderr)
    if json_file is not None:
        emit(report, "", json_file)


def _tokens(tokenizer: Any, text: str, chat: bool) -> list[int]:
    if not chat:
        return list(tokenizer(text)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        raise UsageError("--chat: the tokenizer has no chat template.")
    message = [{"role": "user", "content": text}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])


def _baseline(loaded: Any, tokens: list[int], params: Any) -> dict[str, Any]:
    """Transformers' own generate, after a warm-up of four tokens."""
    import torch

    ids = torch.tensor([tokens], device=loaded.model.device)
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": params.temperature > 0}
    if params.temperature > 0:
        options |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        torch.manual_seed(params.seed or 0)
    loaded.model.generate(ids, max_new_tokens=min(4, params.max_tokens), **options)
    begin = perf_counter()
    new = loaded.model.generate(ids, max_new_tokens=params.max_tokens, **options)[0, len(tokens) :].tolist()
    seconds = perf_counter() - begin
    return {"tokens": new, "tokens_per_second": len(new) / seconds}
