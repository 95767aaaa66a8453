"""A launch function of a user, whose configurations take as long as they sleep on the bench's simulated clock."""

import torch

import tilewright
from tilewright.bench import timing

SLEEPS = {64: 4e-3, 128: 1e-3, 256: 2e-3}  # seconds on the simulated clock: 128 is the fastest
SPACE = {"BLOCK": (64, 128, 256)}


def sizes(x, out, *rest):
    return {"M": x.shape[0], "N": x.shape[1]}


class Double:
    """A kernel that writes 2x, and its calls.   faults: what else happens, by BLOCK."""

    def __init__(self, faults=None, **options):
        self.blocks, self.faults = [], faults or {}
        options = {"space": SPACE, "key": sizes, "restore": ("out",), "name": "double"} | options

        def double(x, out, *, BLOCK):
            self.blocks.append(BLOCK)
            timing.time.sleep(SLEEPS.get(BLOCK, 1e-3))
            fault = self.faults.get(BLOCK)
            if fault is not None:
                fault(x, out)
            else:
                torch.mul(x, 2, out=out)
            return BLOCK

        self.launch = tilewright.tune(**options)(double)

    def run(self, x, out=None):
        """BLOCK of the last launch, and the number of launches."""
        self.blocks.clear()
        block = self.launch(x, torch.zeros_like(x) if out is None else out)
        return block, len(self.blocks)


def raises(x, out):
    raise ValueError("no such tile")
