"""Open what the command line names: a model folder or a Python file with a factory, and a file of prompts."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilewright.assistant.wording import first_line
from tilewright.errors import UsageError


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, its tokenizer if it has one, and the example inputs of a factory."""

    model: nn.Module
    tokenizer: Any = None
    inputs: Any = None


def load(name: str, *, device: str | torch.device | None = None) -> Loaded:
    """Open `name`: a local Hugging Face folder (config.json, weights, tokenizer) or `file.py:factory`.

    A folder is opened as the class its configuration names (BertModel stays BertModel), in the dtype of its weights;
    nothing is downloaded and no code in it is run. A factory takes no arguments and returns (module, example inputs).
    device: where the model goes; None takes the GPU if there is one. Raises UsageError for anything else, and where
    opening fails.
    """
    target = _device(device)
    path, colon, factory = name.rpartition(":")
    if colon and path.endswith(".py"):
        return _from_factory(Path(path), factory, target)
    folder = Path(name)
    if not folder.exists():
        raise UsageError(f"MODEL {name!r} does not exist. Give a local model folder, or file.py:factory.")
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise UsageError(
            f"MODEL {name!r} is no Hugging Face model folder: it has no config.json. Give one, or file.py:factory."
        )
    return _from_folder(folder, target)


def load_prompts(path: str | Path) -> list[str]:
    """Read prompts: the "text" of each line of a .jsonl file, or parts of plain text between empty lines.

    Raises UsageError for a file that cannot be read or has no prompt.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"prompts {str(path)!r} cannot be read: {error}.") from error
    texts = _from_jsonl(file, text) if file.suffix == ".jsonl" else [part.strip("\n") for part in text.split("\n\n")]
    prompts = [prompt for prompt in texts if prompt.strip()]
    if not prompts:
        raise UsageError(f"prompts {str(path)!r} holds no prompt.")
    return prompts


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        parsed = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not known. Give cpu, cuda or cuda:N.") from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r}: torch sees no GPU here. Give cpu.")
    return parsed


def _from_folder(folder: Path, device: torch.device) -> Loaded:
    try:
        from transformers import AutoConfig, AutoTokenizer
    except ImportError as error:
        raise UsageError("opening a model folder needs transformers: pip install 'tilewright[hf]'.") from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = _class_of(config).from_pretrained(folder, dtype="auto", local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"MODEL {str(folder)!r} cannot be opened: {first_line(error)}") from error
    has_tokenizer = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json"))
    tokenizer = (
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False) if has_tokenizer else None
    )
    return Loaded(model.eval().to(device), tokenizer)


def _class_of(config: Any) -> Any:
    """The class in `config.architectures`; where none is named, AutoModelForCausalLM if it has that type of model,
    else AutoModel.
    """
    import transformers

    for name in config.architectures or ():
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, nn.Module):
            return cls
    class_names = ", ".join(config.architectures or ())
    if class_names:
        raise ValueError(f"its configuration names {class_names}, which this transformers does not know.")
    causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModel


def _from_factory(path: Path, name: str, device: torch.device) -> Loaded:
    label = f"{path}:{name}"
    if not path.is_file():
        raise UsageError(f"MODEL {label!r}: there is no file {str(path)!r}.")
    factory = getattr(_module(path, label), name, None)
    if not callable(factory):
        raise UsageError(f"MODEL {label!r}: {path.name} has no function {name!r}.")
    result = _call(factory, label)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise UsageError(
            f"MODEL {label!r} returned {type(result).__name__}; it has to return (module, example inputs)."
        )
    module, inputs = result
    return Loaded(module.eval().to(device), None, inputs)


def _module(path: Path, label: str) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"MODEL {label!r}: {path.name} is no Python file.")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up by name
    _call(partial(loader.exec_module, module), label)
    return module


def _call(function: Callable[[], Any], label: str) -> Any:
    try:
        return function()
    except Exception as error:
        raise UsageError(f"MODEL {label!r} failed: {first_line(error)}") from error


def _from_jsonl(file: Path, text: str) -> list[str]:
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            prompts.append(str(json.loads(line)["text"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UsageError(
                f'prompts {str(file)!r}, line {number}: every line has to be an object with "text".'
            ) from error
    return prompts
