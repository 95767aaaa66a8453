"""What a compiled Triton kernel costs a GPU, read from its assembly and binary without running it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

# AMD's compiler writes the counts into the assembly's metadata.
_AMD = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "vector_spills": r"\.vgpr_spill_count:\s+(\d+)",
    "scalar_spills": r"\.sgpr_spill_count:\s+(\d+)",
    "stack_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
}
# NVIDIA's is asked with cuobjdump: REG:32 STACK:0 SHARED:0 LOCAL:0 ...
_NVIDIA = {"registers": r"\bREG:(\d+)", "stack_bytes": r"\bSTACK:(\d+)", "local_bytes": r"\bLOCAL:(\d+)"}

# Instructions of the matrix units, by target: mma.sync works everywhere, wgmma on sm_90, tcgen05 on sm_100.
_MATRIX = {"ptx": r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*", "amdgcn": r"\bv_(?:s?mfma|wmma)_\w+"}


@dataclass(frozen=True)
class Resources:
    """Per thread `registers` and bytes of `stack`; `spilled` counts registers (AMD) or bytes (NVIDIA) that did not fit.

    `multiplies` says that the kernel contains `tl.dot`; `matrix_instructions` are the names of those that do its work.
    """

    name: str
    registers: int
    spilled: int
    stack_bytes: int
    shared_bytes: int
    multiplies: bool
    matrix_instructions: tuple[str, ...]

    def faults(self) -> list[str]:
        """What no shipped kernel may do, in words; empty when all is well."""
        found = []
        if self.spilled or self.stack_bytes:
            found.append(f"{self.name} spills: {self.spilled} spilled, {self.stack_bytes} bytes of stack")
        if self.multiplies and not self.matrix_instructions:
            found.append(f"{self.name} contains tl.dot but no matrix instruction")
        return found


def resources(kernel: Any) -> Resources:
    """Read `kernel`, a `triton.compiler.CompiledKernel` for any of our targets."""
    text = "amdgcn" if "amdgcn" in kernel.asm else "ptx"
    counts = _amd(kernel.asm["amdgcn"]) if text == "amdgcn" else _nvidia(kernel.asm["cubin"])
    return Resources(
        name=kernel.name,
        registers=counts["registers"],
        spilled=counts.get("vector_spills", 0) + counts.get("scalar_spills", 0) + counts.get("local_bytes", 0),
        stack_bytes=counts["stack_bytes"],
        shared_bytes=kernel.metadata.shared,
        multiplies="tt.dot" in kernel.asm["ttir"],
        matrix_instructions=tuple(sorted(set(re.findall(_MATRIX[text], kernel.asm[text])))),
    )


def _amd(assembly: str) -> dict[str, int]:
    return {name: _only(pattern, assembly) for name, pattern in _AMD.items()}


def _nvidia(cubin: bytes) -> dict[str, int]:
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return {name: _only(pattern, done.stdout) for name, pattern in _NVIDIA.items()}


def _only(pattern: str, text: str) -> int:
    """The one number; none, or one for each of several kernels, is a change in Triton we must hear about."""
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise ValueError(f"expected one {pattern} in the compiler's report, found {len(found)}")
    return int(found[0])
