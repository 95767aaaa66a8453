"""Importing the library does nothing to the process that every optimizer and every module would notice."""

import subprocess
import sys

import pytest

_SCRIPT = """
import torch
from torch.nn.modules import module
from torch.optim import optimizer
import {name}
tables = [t for at in (module, optimizer) for n, t in vars(at).items() if n.startswith("_global_") and "_hooks" in n]
assert len(tables) >= 8
print(sum(map(len, tables)))
"""


@pytest.mark.parametrize("name", ["tilewright", "tilewright.nn", "tilewright.models"])
def test_an_import_registers_no_hook(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT.format(name=name)], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"
