"""A bundle for a model of the sizes of Llama-3.1-8B, made in a process that sees no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,  # kernels do not depend on their number
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
PROMPT, NEW = 2048, 32


def make(folder: Path, *, fp8: bool, arch: str = "sm_90a") -> Path:
    """`tilewright warmup --model` into a cache of its own below `folder`; returns the bundle."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    bundle = folder / "kernels.zip"
    command = ["warmup", "--model", str(folder), "--arch", arch, "--tokens", str(PROMPT), "--new-tokens", str(NEW)]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TILEWRIGHT_CACHE_DIR": str(folder / "maker")}
    done = subprocess.run(
        [sys.executable, "-m", "tilewright", *command, "--out", str(bundle), *(["--fp8"] if fp8 else [])],
        env={**os.environ, **hidden, "TRITON_CACHE_DIR": str(folder / "triton")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return bundle
