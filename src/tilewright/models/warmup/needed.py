"""Which raw calls a suite or a model makes, found on fake tensors: sizes, strides and types, without memory or GPU.

A model is built from its configuration alone.  Its weights are allocated and never touched, so that an 8B model costs
no memory to speak of; patching probes modules with weights of its own.  Then it runs as it will run, a prefill of each
length and one decode step, under FakeTensorMode, and a recording lists every call of our ops.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.bench.cases import Case, select
from tilewright.dispatch import RawOp, record
from tilewright.errors import PatchError, UsageError
from tilewright.models import transformers_names
from tilewright.models.patching import patch

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 8192,
}
BUILT_IN = {f"tiny-{family}": (family, _TINY) for family in ("llama", "qwen3", "gemma2", "mistral")}
"""Models that need no file, to try the road: name -> (transformers' model type, configuration)."""


class RawCall(NamedTuple):
    """One raw op; of the tensors among its arguments only sizes, strides and types are known."""

    op: RawOp
    args: tuple[Any, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that run the same kernels."""
        described = ((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, Tensor) else repr(a) for a in self.args)
        return (self.op.key, *described)

    def on(self, device: str) -> tuple[Any, ...]:
        """The arguments as tensors on `device`: fake ones on a device that need not exist, or "meta"."""

        def placed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        return tuple(map(placed, self.args))


def of_suite(suite: str, dtype: str | None, device: str) -> Iterator[RawCall]:
    """Calls of every workload that the bench measures on `device`, forward and backward.

    dtype: "bf16", "fp16" or "fp32" instead of what the workloads declare.  Raises UsageError for an unknown suite.
    """
    for case in select(suite, dtype=dtype, device=torch.device(device)):
        yield _of_case(case)


def _of_case(case: Case) -> RawCall:
    contract, gradient = case.contract, case.contract.gradient
    with FakeTensorMode(), torch.no_grad():
        sample = contract.inputs(case.workload.params, case.dtype, torch.device("cpu"), 0)
        with record() as notes:
            public = contract.function(*sample.args, **sample.kwargs)
        ((op, args, *wish),) = notes.calls
        if case.direction == "fwd" or gradient is None:
            return RawCall(op, args)
        made = op(*args, *wish)  # those too that the public function keeps to itself, which get no gradient
        outputs = made if isinstance(made, tuple) else (made,)
        plain = tuple(None if isinstance(a, Tensor) else a for a in args)
        needs = tuple(isinstance(a, Tensor) for a in args)
        wanted = len(public) if isinstance(public, tuple) else 1
        grads = tuple(torch.empty_like(out) if i < wanted else None for i, out in enumerate(outputs))
        return RawCall(gradient.op, gradient.raw_args(grads, gradient.save(args, outputs), plain, needs))


def of_model(name: str, dtype: str | None, batch: int, tokens: Sequence[int]) -> list[RawCall]:
    """Calls of a patched model: prefills of `tokens` tokens each and one decode step, for `batch` sequences.

    name: a Hugging Face model folder, its config.json, or one of `BUILT_IN`.  Raises UsageError.
    """
    model = _build(name, dtype)
    try:
        patch(model, verify=False)  # its numbers are unknown here; the user's own patch() will verify
    except PatchError as error:
        raise UsageError(f"--model {name}: {error}") from error
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), record() as notes:
        for length in tokens:
            made = model(input_ids=torch.ones(batch, length, dtype=torch.long), use_cache=True)
        step = torch.ones(batch, 1, dtype=torch.long)
        model(input_ids=step, past_key_values=made.past_key_values, use_cache=True)
    calls = [RawCall(op, args) for op, args, _, _ in notes.calls]
    return list({call.signature: call for call in calls}.values())


def _build(name: str, dtype: str | None) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError("--model needs transformers 5: pip install 'tilewright[hf]'.") from error
    if name in BUILT_IN:
        family, sizes = BUILT_IN[name]
        config = AutoConfig.for_model(family, **sizes)
    else:
        config = AutoConfig.for_model(**_read(name))
    own = getattr(config, "dtype", None)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: own or torch.bfloat16}[dtype]
    try:
        with transformers_names.no_init_weights():
            return AutoModelForCausalLM.from_config(config, dtype=wanted).eval()
    except ValueError as error:  # a type of model that generates no text
        raise UsageError(f"--model {name}: {str(error).partition(chr(10))[0]}") from error


def _read(name: str) -> dict[str, Any]:
    """The contents of a config.json, checked for what building needs."""
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(
            f"--model {name}: there is no {file}. Give a model folder, its config.json, or one of: "
            f"{', '.join(BUILT_IN)}."
        )
    from transformers import CONFIG_MAPPING

    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name}: {file} cannot be read as JSON ({error}).") from error
    kind = found.get("model_type") if isinstance(found, dict) else None
    if kind not in CONFIG_MAPPING:
        raise UsageError(f"--model {name}: {file} has model_type {kind!r}, which this transformers does not know.")
    return dict(found)
