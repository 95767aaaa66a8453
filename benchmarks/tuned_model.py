"""The sizes of one model's products and attention under `auto`, beside every peer: what a tuned table is worth.

    tilewright tune examples/qwen_7b.py:factory --budget 5m
    python benchmarks/tuned_model.py examples/qwen_7b.py:factory --json FILE [--budget SECONDS]

The model is recorded as `tilewright tune MODEL` records it: patched, run once, put back.  Each size of the named ops
becomes a case of the bench, in the sizes of the call: cold L2, interleaved, checked before and after; `auto` takes what
the tables in force say, so rows before and after a `tune` differ by the table alone.  A size that no workload of the
op can stand for is named.  The summary is that of `any_size.py`: best peer over `auto`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from any_size import summary

from tilewright.assistant.load import load
from tilewright.bench.cases import Case
from tilewright.bench.schema import Results
from tilewright.bench.suite import run
from tilewright.cli.options import device, lengths, names, seconds
from tilewright.cli.output import check_writable, write
from tilewright.dispatch import Workload, contract
from tilewright.errors import TilewrightError
from tilewright.ops.attention.vendor import forget_signatures
from tilewright.tuning.model import TOKENS, Size, sizes_of
from tilewright.tuning.problem import Problem, bucket_of, modules_of
from tilewright.tuning.recorded import RecordedCall, TensorForm
from tilewright.tuning.sizes import workload_of

SUITE = "tuned_model"
OPS = ("matmul", "bmm", "scaled_matmul", "weight_only_matmul", "fmha", "fmha_decode", "fmha_paged", "mla", "mla_decode")
SEARCH_S = 10.0  # for the workload of a bucket


def cases_of(sizes: Sequence[Size], place: torch.device) -> Iterator[Case | str]:
    """A case for each size, or the key of one that no workload stands for; most calls first."""
    for size in sorted(sizes, key=lambda size: -size.calls):
        found = None if size.largest is None else _workload(size, size.largest, place)
        if found is None:
            yield f"{size.raw.op} {size.plan.bucket} {size.plan.dtype}: {size.refused or 'no workload has this bucket'}"
            continue
        params = {**found.params, "calls": size.calls}
        named = replace(found, name=size.plan.bucket, params=params, directions=("fwd",))
        yield Case(contract(size.raw.op), named, getattr(torch, size.plan.dtype), "fwd")


def _workload(size: Size, form: RecordedCall, place: torch.device) -> Workload | None:
    """The sizes of the call if they give its bucket, else what the tuner finds for the bucket; None if nothing does."""
    op, dtype = size.raw.op, getattr(torch, size.plan.dtype)
    bucket, modules = size.raw.bucket_of(form.on("meta"), "default"), modules_of(contract(op), place.type)
    shapes = [leaf.shape for leaf in form.args if isinstance(leaf, TensorForm)]
    for params in _own_params(op, shapes):
        if bucket_of(Problem(op, "fwd", params, dtype, str(place), 0, modules, True)) == bucket:
            return Workload(op, params)
    found = workload_of(size.raw, bucket, dtype, place, SEARCH_S)
    return found[0] if found is not None and found[1] == dtype else None


def _own_params(op: str, shapes: Sequence[tuple[int, ...]]) -> Iterator[dict[str, Any]]:
    """Parameters of a workload of the call's own sizes, plain forms first; none for an op whose names differ."""
    if op == "matmul":
        (m, k), n = shapes[0][-2:], shapes[1][-1]
        yield from ({"M": m, "N": n, "K": k, **options} for options in ({}, {"bias": True}))
    if op == "fmha":
        (batch, heads, s_q, d), (kv_heads, s_k) = shapes[0], shapes[1][1:3]
        sizes = {"B": batch, "H": heads, "H_kv": kv_heads, "D": d, "S_q": s_q, "S_k": s_k}
        yield from ({**sizes, **options} for options in ({"causal": True}, {}))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or FILE.py:FACTORY")
    parser.add_argument("--ops", help=f"only these, separated by commas; default: {','.join(OPS)}")
    parser.add_argument("--tokens", help="lengths of the prefills; default: the factory's inputs, else 1024,1000")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--fp8", action="store_true", help="linear layers in float8, as patch(fp8=True)")
    parser.add_argument("--against", help="peers, separated by commas; default: all")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, cpu")
    parser.add_argument("--budget", help="end after this time: 90s, 5m, 1h")
    parser.add_argument("--json", type=Path, help="write bench JSON here, after every case")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> int:
    check_writable(options.json)
    place, ops = torch.device(device(options.device) or "cuda"), names(options.ops) or OPS
    loaded = load(options.model, device=place)
    sizes = sizes_of(
        loaded.model,
        loaded.inputs if options.tokens is None else None,
        tokens=TOKENS if options.tokens is None else lengths(options.tokens),
        new_tokens=options.new_tokens,
        batch=options.batch,
        fp8=options.fp8,
    )
    del loaded
    gc.collect()
    found = list(cases_of([size for size in sizes if size.raw.op in ops], place))
    cases = [each for each in found if isinstance(each, Case)]

    def keep(results: Results) -> None:
        forget_signatures()
        if options.json is not None:
            write(options.json, results.to_json() + "\n")

    forget_signatures()  # the recording had a length of keys for each step, and cuDNN gets some 16 in a process
    results = run(
        SUITE,
        cases=cases,
        against=names(options.against),
        budget=None if options.budget is None else seconds(options.budget),
        device=place,
        only_chosen=True,
        progress=lambda line: print(line, flush=True),
        keep=keep,
    )
    keep(results)
    print(*summary(results.rows), sep="\n")
    for each in found:
        if isinstance(each, str):
            print(f"not measured: {each}")
    for note in results.failures:
        print(f"FAILED {note.op} {note.case} {note.dtype} {note.name}: {note.reason}")
    return 0 if results.ok else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, measure, print; the exit code is 1 if a row failed, 2 for wrong options."""
    try:
        return _run(_options(arguments))
    except TilewrightError as error:
        print(f"tuned_model: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
