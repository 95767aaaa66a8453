"""The packed model of the example: every bit comes back, damage is found, and many processes may unpack at once."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).parents[2] / "examples" / "stdlib_lm" / "weights.py"
spec = importlib.util.spec_from_file_location("stdlib_lm_weights", SCRIPT)
weights = importlib.util.module_from_spec(spec)
spec.loader.exec_module(weights)


ALL = sorted(["model.safetensors", "weights.packed", "texts.tar.xz", *weights.TEXTS])


def _text(name):
    return f"{name}, naïve\n".encode() * 100


@pytest.fixture
def folder(tmp_path):
    """A folder with the packed form alone of 3000 trained-looking numbers and every special one; and the original."""
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40], dtype=torch.bfloat16)
    tensors = {"w": (0.02 * torch.randn(60, 50, generator=generator)).bfloat16(), "special": special}
    save_file(tensors, tmp_path / weights.UNPACKED)
    original = (tmp_path / weights.UNPACKED).read_bytes()
    for name in weights.TEXTS:
        (tmp_path / name).write_bytes(_text(name))
    weights.pack(tmp_path)
    for name in (weights.UNPACKED, *weights.TEXTS):
        (tmp_path / name).unlink()
    return tmp_path, original


def test_every_bit_pattern_survives():
    patterns = np.arange(1 << 16, dtype="<u2")
    exponents, rest = weights.split(patterns)
    assert len(exponents) == len(rest) == 1 << 16
    assert np.array_equal(weights.join(exponents, rest), patterns)
    assert exponents[0x3F80] == 127  # 1.0


def test_mantissas_are_rounded_to_the_nearest_and_ties_to_even():
    unit = 2.0**-weights.MANTISSA
    given = torch.tensor([1 + unit / 4, 1 + unit / 2, 1 + 1.5 * unit, 1 + 0.75 * unit, 2 - unit / 4, 0.0])
    wanted = torch.tensor([1.0, 1.0, 1 + 2 * unit, 1 + unit, 2.0, 0.0])
    for scale in (1.0, -(2.0**-20)):
        assert torch.equal(weights.shortened((given * scale).bfloat16()), (wanted * scale).bfloat16())
    many = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    off = (weights.shortened(many).float() / many.float() - 1).abs()
    assert unit / 4 < off.max() <= unit / 2


def test_unpacking_gives_the_very_file(folder):
    where, original = folder
    assert weights.unpack(where) == where
    assert (where / weights.UNPACKED).read_bytes() == original
    assert set(load_file(where / weights.UNPACKED)) == {"w", "special"}
    assert sorted(path.name for path in where.iterdir()) == ALL


@pytest.mark.parametrize("name", [weights.UNPACKED, *weights.TEXTS])
def test_a_file_that_is_right_is_not_written_again(folder, name):
    where, _ = folder
    before = (weights.unpack(where) / name).stat()
    assert (weights.unpack(where) / name).stat().st_ino == before.st_ino


def test_the_texts_come_back_and_replace_others(folder):
    where, _ = folder
    (where / weights.TEXTS[0]).write_text("of another model")
    weights.unpack(where)
    assert {name: (where / name).read_bytes() for name in weights.TEXTS} == {n: _text(n) for n in weights.TEXTS}


def test_packing_twice_gives_the_same_bytes(folder):
    where, _ = folder
    before = (weights.unpack(where) / weights.PACKED_TEXTS).read_bytes()
    weights.pack(where)
    assert (where / weights.PACKED_TEXTS).read_bytes() == before


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "other files"])
def test_damaged_texts_are_found(folder, damage):
    where, _ = folder
    packed = (where / weights.PACKED_TEXTS).read_bytes()
    middle = len(packed) // 2
    (where / weights.PACKED_TEXTS).write_bytes(
        {
            "cut": packed[:middle],
            "changed": packed[:middle] + bytes([packed[middle] ^ 0x10]) + packed[middle + 1 :],
            "empty": b"",
            "other files": weights._archive({"../tokenizer.json": b"{}"}),
        }[damage]
    )
    with pytest.raises(ValueError, match="texts.tar.xz is damaged"):
        weights.unpack(where)
    assert not any((where / name).exists() for name in weights.TEXTS)


def test_a_file_of_other_weights_is_replaced(folder):
    where, original = folder
    (where / weights.UNPACKED).write_bytes(original[:-1] + b"?")
    weights.unpack(where)
    assert (where / weights.UNPACKED).read_bytes() == original


def _at(packed: bytes, part: str) -> int:
    """An offset in the middle of a part of the packed file."""
    line, _, _ = packed.partition(b"\n")
    sizes = json.loads(line)
    starts = {"head": 0, "exponents": sizes["head"], "rest": sizes["head"] + sizes["exponents"]}
    return len(line) + 1 + starts[part] + sizes[part] // 2


@pytest.mark.parametrize("part", ["head", "exponents", "rest"])
def test_a_changed_byte_is_found(folder, part):
    where, _ = folder
    packed = bytearray((where / weights.PACKED).read_bytes())
    packed[_at(packed, part)] ^= 0x10
    (where / weights.PACKED).write_bytes(packed)
    with pytest.raises(ValueError, match="weights.packed is damaged"):
        weights.unpack(where)
    assert not (where / weights.UNPACKED).exists()


@pytest.mark.parametrize("part", ["exponents", "rest"])
def test_a_file_cut_short_is_found(folder, part):
    where, _ = folder
    packed = (where / weights.PACKED).read_bytes()
    (where / weights.PACKED).write_bytes(packed[: _at(packed, part)])
    with pytest.raises(ValueError, match="weights.packed is damaged"):
        weights.unpack(where)


@pytest.mark.parametrize("head", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"[]\n", b'{"head": 8}\n'])
def test_a_file_without_its_first_line_is_found(folder, head):
    where, _ = folder
    (where / weights.PACKED).write_bytes(head)
    with pytest.raises(ValueError, match="weights.packed is damaged: its first line"):
        weights.unpack(where)


@pytest.mark.parametrize("name", ["weights.packed", "texts.tar.xz"])
def test_a_folder_without_a_packed_file_says_how_to_train(folder, name):
    where, _ = folder
    (where / name).unlink()
    with pytest.raises(FileNotFoundError, match=rf"no {name} in .*train.py --out"):
        weights.unpack(where)


def test_other_dtypes_are_refused(tmp_path):
    save_file({"w": torch.zeros(4), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / weights.UNPACKED)
    with pytest.raises(ValueError, match="has F32 tensors; only BF16"):
        weights.pack(tmp_path)


def test_processes_may_unpack_at_once(folder):
    """Each reads the file as soon as it has it: a part of one would have another checksum."""
    where, original = folder
    program = (
        "import hashlib, pathlib, runpy, sys\n"
        "folder = runpy.run_path(sys.argv[1])['unpack'](pathlib.Path(sys.argv[2]))\n"
        "print(hashlib.sha256((folder / 'model.safetensors').read_bytes()).hexdigest())\n"
    )
    command = [sys.executable, "-c", program, str(SCRIPT), str(where)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    seen = {process.communicate(timeout=60)[0].strip() for process in running}
    assert seen == {weights._sha256(original)}
    assert sorted(path.name for path in where.iterdir()) == ALL


def test_the_committed_weights_take_two_thirds():
    folder = weights.unpack()
    assert (folder / weights.PACKED).stat().st_size < 0.67 * (folder / weights.UNPACKED).stat().st_size
