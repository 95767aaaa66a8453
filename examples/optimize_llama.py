"""Optimise a Llama with random weights: what was tried, what was kept, what it brought on this machine.

    python examples/optimize_llama.py

The weights are random because speed does not depend on them; give `optimize` a trained model and prompts of yours, and
accuracy is judged on those. Takes about two minutes on two CPU cores, most of it for compiling.
"""

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import tilewright
from tilewright.assistant.view import terminal

config = LlamaConfig(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
)
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval().to(device)
input_ids = torch.randint(3, config.vocab_size, (1, 256), device=device)

console = Console()
with terminal.progress(console) as progress:
    opt = tilewright.optimize(model, input_ids, new_tokens=32, progress=progress)
terminal.show(opt.report, console)

kept = [change.name for change in opt.accepted]
tokens = opt.model.generate(input_ids, max_new_tokens=8, do_sample=False)  # with everything that was kept
opt.undo()
same = torch.equal(tokens, model.generate(input_ids, max_new_tokens=8, do_sample=False))
console.print(
    f"kept: {', '.join(kept) or 'nothing'}; the unchanged model generates {'the same' if same else 'other'} tokens"
)
