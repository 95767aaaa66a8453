"""Patch one Hugging Face Llama, see what was replaced, check its accuracy, and undo.

python examples/patch_llama.py                  # a small random Llama on whatever machine this is
python examples/patch_llama.py /path/to/model   # any local Hugging Face causal language model
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tilewright


def small_llama() -> LlamaForCausalLM:
    """Llama's architecture with random weights, small enough for a CPU."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """One patch from beginning to end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]) if len(sys.argv) > 1 else small_llama()
    model = model.to(device, torch.bfloat16).eval()
    ids = torch.randint(0, model.config.vocab_size, (1, 32), device=device)

    with torch.no_grad():
        before = model(ids).logits
        with tilewright.patch(model) as patched:  # verifies; raises VerificationError if accuracy were lost
            print(patched.report(), "\n")
            print(patched.verify(ids), "\n")
            model.generate(ids, max_new_tokens=16, do_sample=False)
        print("after undo, bit-identical:", torch.equal(model(ids).logits, before))


if __name__ == "__main__":
    main()
