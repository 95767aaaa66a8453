r"""Train one Llama on the same batches in several ways, and with Liger where it is installed.

    python benchmarks/training.py --json FILE [--seeds 5] [--steps 200] [--contestants eager patched]
    python benchmarks/training.py --json FILE --seeds 2 --steps 4 --batch 2 --context 64 --layers 1    # on a CPU
    python benchmarks/training.py --json FILE --seeds 1 --steps 12 --batch 4 --context 2048 --layers 4 --hidden 4096 \
        --inner 14336 --head 128 --group 4 --vocab 128256 --lr 1e-4       # Llama 3 8B's layers, on a GPU
    ... --batch 1 --context 8192 --documents 1024       # the same tokens, packed documents of 1024 tokens on average

  eager, compile, patched, liger     torch's fused AdamW and clipping
  tilewright, tilewright_compile     patched, with `tilewright.optim.AdamW`, which clips in its step; compiled besides

`loss_curves.py` judges and draws what is written here.
Every contestant runs in a process of its own, because Liger changes transformers' classes and memory is a process'.
A seed draws the weights and the batches, so contestants differ in rounding alone. The text is the standard library's,
with the embedded model's tokenizer; a larger `--vocab` gives the head the size that it has in large models.
`loss` is that of each step, `step_ms` its time, the first of which compiles; `peak_bytes` is what the allocator held on
a GPU, and the process on a CPU. Weights are float32; on a GPU products are bf16 by autocast.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "stdlib_lm"
sys.path.insert(0, str(EXAMPLE))

import data  # noqa: E402
import tokenizer as bpe  # noqa: E402
import weights  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

import tilewright  # noqa: E402
from tilewright.bench import machine  # noqa: E402
from tilewright.bench.commit import commit  # noqa: E402
from tilewright.dispatch.backends import module_exists  # noqa: E402

CONTESTANTS = ("eager", "compile", "patched", "tilewright", "tilewright_compile", "liger")
OWN = ("tilewright", "tilewright_compile")


def build(options, seed, device):
    """A Llama with random weights, the same for every contestant of one seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.inner or options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // options.head,
        num_key_value_heads=options.hidden // options.head // options.group or 1,
        max_position_embeddings=options.context,
    )
    with device:
        return LlamaForCausalLM(config)


def prepared(contestant, model):
    """What a step calls."""
    if contestant in ("patched", *OWN):
        tilewright.patch(model, mode="train", verify=False)
    return torch.compile(model) if contestant.endswith("compile") else model


def finisher(contestant, model, lr):
    """What follows a backward: clipping and the optimizer's step."""
    params, betas = [*model.parameters()], (0.9, 0.95)
    if contestant in OWN:
        optimizer = tilewright.optim.AdamW(params, lr=lr, betas=betas, max_grad_norm=1.0)
    else:
        optimizer = torch.optim.AdamW(params, lr=lr, betas=betas, fused=params[0].is_cuda)

    def finish():
        if contestant not in OWN:
            nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return finish


def positions(options, generator):
    """(B, S): from 0 in each document; a token begins one with a chance of one in `documents`."""
    shape = options.batch, options.context
    begins = torch.rand(shape, generator=generator, device=generator.device) * options.documents < 1
    place = torch.arange(options.context, device=generator.device).expand(shape)
    return place - torch.where(begins, place, 0).cummax(1).values


def train(contestant, options, stream, seed):
    """One run: its losses, the time of each step, and the memory at its peak."""
    device = stream.device
    model = build(options, seed, device).train()
    call = prepared(contestant, model)
    finish = finisher(contestant, model, options.lr)
    generator = torch.Generator(device).manual_seed(seed)
    offsets = torch.arange(options.context, device=device)
    losses, times = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.steps):
        inputs = {"position_ids": positions(options, generator)} if options.documents else {}
        starts = torch.randint(stream.numel() - options.context, (options.batch, 1), generator=generator, device=device)
        ids = stream[starts + offsets]
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = call(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
        loss.backward()
        finish()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - began)
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seed": seed,
        "loss": [round(x, 5) for x in losses],
        "step_ms": [round(1e3 * x, 3) for x in times],
        "peak_bytes": peak,
    }


def run(contestant, options):
    """All seeds of one contestant, in this process."""
    if contestant == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    tokenizer = Tokenizer.from_file(str(weights.unpack() / "tokenizer.json"))
    files = data.split(data.collect(data.stdlib_root()))["train"]
    stream = bpe.encode(tokenizer, files[: options.files]).to("cuda" if torch.cuda.is_available() else "cpu")
    return [train(contestant, options, stream, seed) for seed in range(options.seeds)]


def parsed():
    """The options; `--one` is how a contestant's process is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--lr", type=float, default=1e-3)
    sizes = {"seeds": 5, "steps": 200, "batch": 16, "context": 512, "layers": 5, "hidden": 192, "vocab": 4096}
    shape = {"head": 32, "group": 3, "inner": 0}  # columns of a head, heads to one of keys, columns inside an MLP
    for name, default in {**sizes, **shape, "files": 40, "documents": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def main():
    """Run every contestant that is installed, one after the other, and write what they measured so far."""
    options = parsed()
    if options.one:
        options.json.write_text(json.dumps(run(options.one, options)))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = machine.clocks(device)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for contestant in options.contestants:
            if contestant == "liger" and not module_exists("liger_kernel"):
                print("liger is not installed")
                continue
            result = Path(folder) / f"{contestant}.json"
            arguments = [*sys.argv[1:], "--one", contestant, "--json", str(result)]
            subprocess.run([sys.executable, __file__, *arguments], check=True)
            rows[contestant] = json.loads(result.read_text())
            last = [row["loss"][-1] for row in rows[contestant]]
            middle = sorted(ms for row in rows[contestant] for ms in row["step_ms"][1:])
            print(contestant, "last losses", last, "median step", middle[len(middle) // 2], "ms")
            found = machine.describe(device, before=before, after=machine.clocks(device)).to_dict()
            facts = {name: value for name, value in vars(options).items() if name not in ("json", "one", "contestants")}
            options.json.write_text(json.dumps({"machine": found, "commit": commit(), **facts, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
