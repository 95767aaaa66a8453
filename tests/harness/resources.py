"""What a compiled Triton kernel costs a GPU, read from its assembly and binary without running it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from tests.harness.uniform_registers import of_binary
from triton.backends.nvidia.compiler import get_ptxas

# AMD's compiler writes the counts into the assembly's metadata.
_AMD = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "vector_spills": r"\.vgpr_spill_count:\s+(\d+)",
    "scalar_spills": r"\.sgpr_spill_count:\s+(\d+)",
    "stack_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
}
# NVIDIA's cuobjdump says of a binary: REG:32 STACK:0 SHARED:0 LOCAL:0 ...
_NVIDIA = {"registers": r"\bREG:(\d+)", "stack_bytes": r"\bSTACK:(\d+)"}
_PTXAS_SPILLS = r"(\d+) bytes spill (?:stores|loads)"

# Instructions of the matrix units, by target: mma.sync works everywhere, wgmma on sm_90, tcgen05 on sm_100.
_WIDTH = r"wgmma\.mma_async\.\S*?m64n(\d+)"
_MATRIX = {"ptx": r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*", "amdgcn": r"\bv_(?:s?mfma|wmma)_\w+"}


@dataclass(frozen=True)
class Resources:
    """Per thread `registers` and bytes of stack; `spilled`: registers (AMD) or bytes moved (NVIDIA) that did not fit.

    A stack without spills holds arrays or return addresses. `multiplies` says that the kernel contains `tl.dot`;
    `matrix_instructions` are the names of those that do its work.  `unset`: see `uniform_registers`, read of kernels
    whose matrix instructions have several widths, and `matrix_descriptors`.
    """

    name: str
    registers: int
    spilled: int
    stack_bytes: int
    shared_bytes: int
    multiplies: bool
    matrix_instructions: tuple[str, ...]
    unset: tuple[str, ...] = ()

    def faults(self) -> list[str]:
        """What no shipped kernel may do, in words; empty when all is well."""
        found = []
        if self.spilled:
            found.append(f"{self.name} spills {self.spilled} at {self.registers} registers")
        if self.multiplies and not self.matrix_instructions:
            found.append(f"{self.name} contains tl.dot but no matrix instruction")
        if self.unset:
            found.append(
                f"{self.name} reads uniform registers that nothing wrote, or no tile's address: {self.unset[0]}"
            )
        return found


def resources(kernel: Any) -> Resources:
    """Read `kernel`, a `triton.compiler.CompiledKernel` for any of our targets."""
    text = "amdgcn" if "amdgcn" in kernel.asm else "ptx"
    counts = _amd(kernel) if text == "amdgcn" else _nvidia(kernel)
    several = text == "ptx" and len(set(re.findall(_WIDTH, kernel.asm[text]))) > 1
    return Resources(
        name=kernel.name,
        registers=counts["registers"],
        spilled=counts["spilled"],
        stack_bytes=counts["stack_bytes"],
        shared_bytes=kernel.metadata.shared,
        multiplies="tt.dot" in kernel.asm["ttir"],
        matrix_instructions=tuple(sorted(set(re.findall(_MATRIX[text], kernel.asm[text])))),
        unset=tuple(of_binary(kernel.asm["cubin"])) if several else (),
    )


def _amd(kernel: Any) -> dict[str, int]:
    counts = {name: _only(pattern, kernel.asm["amdgcn"]) for name, pattern in _AMD.items()}
    return {**counts, "spilled": counts["vector_spills"] + counts["scalar_spills"]}


def _nvidia(kernel: Any) -> dict[str, int]:
    """Registers and stack from the binary; what a stack is for, only the assembler's own report tells."""
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(kernel.asm["cubin"])
        report = _run(cuobjdump, "-res-usage", binary)
        counts = {name: _only(pattern, report) for name, pattern in _NVIDIA.items()}
        return {**counts, "spilled": _ptxas_spills(kernel, Path(folder)) if counts["stack_bytes"] else 0}


def _ptxas_spills(kernel: Any, folder: Path) -> int:
    """Assemble the PTX once more, as Triton did, and add up the bytes of spill stores and loads."""
    ptx, architecture = kernel.asm["ptx"], kernel.metadata.target.arch
    (name,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    report = _run(get_ptxas(architecture).path, "-v", f"--gpu-name={name}", source, "-o", folder / "again.cubin")
    return sum(int(bytes_moved) for bytes_moved in re.findall(_PTXAS_SPILLS, report))


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _only(pattern: str, text: str) -> int:
    """The one number; none, or one for each of several kernels, is a change in Triton we must hear about."""
    found = re.findall(pattern, text)
    if len(found) != 1:
        raise ValueError(f"expected one {pattern} in the compiler's report, found {len(found)}")
    return int(found[0])
