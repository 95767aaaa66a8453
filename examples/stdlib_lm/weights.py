"""The committed model, packed without loss: 2.6 MB in the repository, 5.7 MB where it is used.

    python examples/stdlib_lm/weights.py     # unpacks beside the packed files, once, and prints the model folder

A trained bf16 number is 8 bits of exponent, of which few values occur, and 8 bits of sign and mantissa, which are
noise. Training rounds the mantissas to 4 bits (`shortened`), which the model does not notice (README). Both halves are
Huffman-coded: exponents take 2.6 bits, 1 % above their entropy, signs and mantissas 5. What looks for repetitions (xz)
finds none and takes 8 % more.

`weights.packed` is a line of JSON (sizes in bytes, and the sha256 of what comes out), the head of the safetensors file,
the exponents as raw deflate, the signs and mantissas too.

`texts.tar.xz` is what training wrote beside the weights, 68 KB for 227: the tokenizer, the prompts, the hashes of the
training files and the curve, which change with the weights and never alone.
"""

import hashlib
import io
import json
import lzma
import tarfile
import uuid
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

MODEL = Path(__file__).parent / "model"
PACKED, UNPACKED = "weights.packed", "model.safetensors"
PACKED_TEXTS = "texts.tar.xz"
MANTISSA = 4
TEXTS = ("prompts.jsonl", "tokenizer.json", "train_files.sha256", "training_log.jsonl")


def pack(folder: Path) -> None:
    """Write `weights.packed` and `texts.tar.xz` beside what they hold; the tensors have to be bf16."""
    _pack_weights(folder)
    _publish(folder / PACKED_TEXTS, _archive({name: (folder / name).read_bytes() for name in TEXTS}))


def unpack(folder: Path = MODEL) -> Path:
    """Make sure that `folder` holds the model, bit for bit as it was packed.  Returns `folder`.

    A file that is there and right is left alone; several processes may call this at once. Raises FileNotFoundError
    where nothing is packed, ValueError where a packed file is damaged.
    """
    missing = [name for name in (PACKED, PACKED_TEXTS) if not (folder / name).is_file()]
    if missing:
        train = Path(__file__).with_name("train.py")
        raise FileNotFoundError(f"no {missing[0]} in {folder}. Train a model: python {train} --out {folder}")
    _unpack_weights(folder)
    _unpack_texts(folder)
    return folder


def _pack_weights(folder: Path) -> None:
    file = (folder / UNPACKED).read_bytes()
    head = file[: 8 + int.from_bytes(file[:8], "little")]  # safetensors: length of a JSON, the JSON, then the values
    tensors = json.loads(head[8:])
    tensors.pop("__metadata__", None)
    others = sorted({tensor["dtype"] for tensor in tensors.values()} - {"BF16"})
    if others:
        raise ValueError(f"{folder / UNPACKED} has {', '.join(others)} tensors; only BF16 is packed.")
    exponents, rest = split(np.frombuffer(file, "<u2", offset=len(head)))
    coded, coded_rest = _coded(exponents), _coded(rest)
    sizes = {"sha256": _sha256(file), "head": len(head), "exponents": len(coded), "rest": len(coded_rest)}
    _publish(folder / PACKED, json.dumps(sizes).encode() + b"\n" + head + coded + coded_rest)


def _coded(numbers: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, strategy=zlib.Z_HUFFMAN_ONLY)
    return coder.compress(numbers) + coder.flush()


def _unpack_weights(folder: Path) -> None:
    packed, unpacked = folder / PACKED, folder / UNPACKED
    line, _, body = packed.read_bytes().partition(b"\n")
    try:
        sizes = json.loads(line)
        wanted, rest_at = sizes["sha256"], sizes["head"] + sizes["exponents"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{packed} is damaged: its first line is not the JSON of its sizes. Check it out again."
        ) from error
    if unpacked.is_file() and _sha256(unpacked.read_bytes()) == wanted:
        return
    try:
        halves = (zlib.decompress(part, -zlib.MAX_WBITS) for part in (body[sizes["head"] : rest_at], body[rest_at:]))
        file = body[: sizes["head"]] + join(*halves).tobytes()
    except (zlib.error, ValueError) as error:
        raise ValueError(f"{packed} is damaged: {error}. Check it out again.") from error
    if _sha256(file) != wanted:
        raise ValueError(f"{packed} is damaged: its contents do not have the sha256 it names. Check it out again.")
    _publish(unpacked, file)


def _archive(texts: dict[str, bytes]) -> bytes:
    """A tar of texts; the same texts give the same bytes."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9 | lzma.PRESET_EXTREME) as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)  # without an owner and a time
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return packed.getvalue()


def _unpack_texts(folder: Path) -> None:
    packed = folder / PACKED_TEXTS
    try:
        with tarfile.open(packed, "r:xz") as archive:
            files = {member.name: archive.extractfile(member) for member in archive}
            texts = {name: file.read() for name, file in files.items() if file is not None}
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{packed} is damaged: {error}. Check it out again.") from error
    if sorted(texts) != sorted(TEXTS):
        raise ValueError(f"{packed} is damaged: it holds {', '.join(sorted(files))}. Check it out again.")
    for name, text in texts.items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != text:
            _publish(folder / name, text)


def split(values: NDArray[np.uint16]) -> tuple[bytes, bytes]:
    """The exponents of bf16 bit patterns, and their signs and mantissas: a byte each, once the sign is turned from the
    top bit to the bottom one.
    """
    turned = (values << 1) | (values >> 15)
    return (turned >> 8).astype(np.uint8).tobytes(), turned.astype(np.uint8).tobytes()


def join(exponents: bytes, rest: bytes) -> NDArray[np.uint16]:
    """What `split` took apart.  Raises ValueError for halves of different lengths."""
    turned = np.frombuffer(exponents, np.uint8).astype("<u2") << 8 | np.frombuffer(rest, np.uint8)
    return (turned >> 1) | (turned << 15)


def shortened(weight: torch.Tensor) -> torch.Tensor:
    """Finite bf16 numbers rounded to `MANTISSA` bits behind the leading one, to nearest, ties to even."""
    lost = 7 - MANTISSA
    bits = weight.view(torch.int16).to(torch.int32)
    bits = bits + (1 << lost - 1) - 1 + (bits >> lost & 1) & -1 << lost
    return bits.to(torch.int16).view(torch.bfloat16)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _publish(path: Path, data: bytes) -> None:
    """Write a file so that no reader ever sees a part of it."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def main() -> None:
    """Unpack the committed weights and print the folder that transformers can load."""
    print(unpack())


if __name__ == "__main__":
    main()
