"""Trace the raw calls of a suite or a model on fake tensors: sizes, strides and dtypes, without memory or GPU.

A model is built from its configuration alone.  Its weights are allocated and never touched, so that an 8B model takes
almost no memory.  Patching probes modules with small random weights, and decides by what was measured on the target
machine.  Then fake tensors on the target device take the place of the weights, and the model runs as it will run:
prefills, steps of its own `generate`, and a step with a static cache.  A recording lists every call of our ops, and a
collector the kernels of decoding, which belong to no op.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.bench.cases import Case, select
from tilewright.dispatch import RawOp, contracts, implementations, record
from tilewright.dispatch.recording import first_call
from tilewright.errors import InputError, PatchError, UsageError
from tilewright.generate.planning import run_planned
from tilewright.jit.collect import Job, collect
from tilewright.log import logger
from tilewright.models import transformers_names
from tilewright.models.patching import plan_patch
from tilewright.warmup.absent import AbsentDevice
from tilewright.warmup.calls import RawCall
from tilewright.warmup.requests import prompts_of, run_requests

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
"""Small models that need no file: name -> (transformers' model type, configuration)."""


def trace_suite(suite: str, dtype: str | None, device: str) -> Iterator[RawCall]:
    """The calls of every workload that the bench measures on `device`, forward and backward.

    dtype: "bf16", "fp16" or "fp32" instead of what the workloads declare.  Raises UsageError for an unknown suite.
    """
    for case in select(suite, dtype=dtype, device=torch.device(device)):
        yield trace_case(case)


def trace_case(case: Case) -> RawCall:
    """The raw call of one case."""
    contract, gradient = case.contract, case.contract.gradient
    with FakeTensorMode(), torch.no_grad():
        sample = contract.inputs(case.workload.params, case.dtype, torch.device("cpu"), 0)
        if case.direction == "fwd" or gradient is None:
            op, args, *_ = first_call(contract.function, *sample.args, **sample.kwargs)
            return RawCall(op, args)
        with record() as notes, _only_declared(contract.forward):
            public = contract.function(*sample.args, **sample.kwargs)
        (op, args, *preference), *_ = notes.calls  # those of its parts follow
        result = op(*args, *preference)  # with outputs that the public function does not return: they get no gradient
        outputs = result if isinstance(result, tuple) else (result,)
        plain = tuple(None if isinstance(a, Tensor) else a for a in args)
        needs = tuple(isinstance(a, Tensor) for a in args)
        public_count = len(public) if isinstance(public, tuple) else 1
        returned = (out if i < public_count and out.is_floating_point() else None for i, out in enumerate(outputs))
        grads = tuple(None if out is None else torch.empty_like(out) for out in returned)
        return RawCall(gradient.op, gradient.raw_args(grads, gradient.save(args, outputs), plain, needs))


@contextmanager
def _only_declared(op: RawOp) -> Iterator[None]:
    """Where torch computes `op`, it returns what it declares; a reference on fake tensors takes most of the time."""

    def declared(*args: Any) -> Any:
        outputs = op.allocate(args, op.device_of(args))
        return outputs[0] if op.count == 1 else outputs or None

    reference, op.reference = op.reference, declared
    try:
        yield
    finally:
        op.reference = reference


class ModelNeeds(NamedTuple):
    """What a patched model runs: raw calls, and kernels that belong to no op."""

    calls: list[RawCall]
    jobs: list[Job]


def trace_model(
    name: str,
    dtype: str | None,
    batch: int,
    tokens: Sequence[int],
    *,
    arch: str,
    new_tokens: int = 128,
    fp8: bool = False,
) -> ModelNeeds:
    """Trace what a patched model runs on `arch` for `batch` sequences: prefills of `tokens` tokens each, and decoding.

    Decoding is traced twice: by the model's own `generate`, and by the attached one, whose static cache holds
    `new_tokens` more.   name: a Hugging Face model folder, its config.json, or one of `BUILT_IN`.   fp8: as
    `patch(fp8=True)`; the casts of the weights are traced too.   Raises UsageError for a model that cannot be built.
    """
    for contract in contracts().values():  # import kernel files first: the small tensors they create must not be fake
        for raw in contract.raw_ops:
            implementations(raw.op, raw.direction)
    model = _build(name, dtype)
    device = torch.device("cpu" if arch == "cpu" else "cuda:0")
    try:
        patched = plan_patch(model, device, fp8)
    except PatchError as error:
        raise UsageError(f"--model {name}: {error}") from error
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        collect(arch) as collector,
        record() as notes,
        AbsentDevice(),
    ):
        _move(model, device)
        patched.apply()
        for _ in run_requests(model, prompts_of(batch, tokens, device), new_tokens):
            pass
        for length in tokens:
            try:
                run_planned(model, batch, length, new_tokens)
            except InputError as error:
                logger.warning("--model %s: no decoding with a static cache is prepared: %s", name, error)
                break
    calls = [RawCall(op, args) for op, args, _, _ in notes.calls]
    return ModelNeeds(list({call.signature: call for call in calls}.values()), collector.jobs)


def _move(model: Any, device: torch.device) -> None:
    """Put fake tensors on `device` in place of parameters and buffers; tied ones stay tied."""
    copies: dict[int, Any] = {}

    def placed(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in copies:
                    copies[id(parameter)] = torch.nn.Parameter(placed(parameter), requires_grad=False)
                module._parameters[name] = copies[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), placed(buffer))


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
    config_dtype = getattr(config, "dtype", None)
    model_dtype = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        None: config_dtype or torch.bfloat16,
    }[dtype]
    try:
        with transformers_names.no_init_weights():
            return AutoModelForCausalLM.from_config(config, dtype=model_dtype).eval()
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
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--model {name}: {file} cannot be read as JSON ({error}).") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in CONFIG_MAPPING:
        raise UsageError(f"--model {name}: {file} has model_type {kind!r}, which this transformers does not know.")
    return dict(config)
