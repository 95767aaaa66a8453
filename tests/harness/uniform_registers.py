"""Does a kernel's machine code read a uniform register that nothing has written?

Hopper's matrix instructions take the addresses of their operands from uniform registers.  ptxas (12.8 to 13.4) has been
seen to compute one from a register that it never set, where two products of different widths read the same shared
memory: results are wrong, or the access is illegal, depending on what the register holds.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from tests.harness.matrix_descriptors import wrong

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\S+\s+)?(\S+)\s*(.*?)\s*;")
_WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "REDUX", "LDCU", "VOTEU")  # what may have a uniform register as its result


def unset(sass: str) -> list[str]:
    """Instructions that read a uniform register before any, in the order of the text, wrote it."""
    written: set[int] = set()
    found = []
    for match in map(_INSTRUCTION.match, sass.splitlines()):
        if match is None:
            continue
        operation, operands = match[1], [operand.strip() for operand in match[2].split(",")]
        result = _result(operation, operands)
        width = 4 if ".128" in operation else 2 if ".64" in operation or "WIDE" in operation else 1
        read = _read(operation, [operand for at, operand in enumerate(operands) if at != result], width)
        if not read <= written:
            found.append(f"{operation} {match[2]}")
        if result is not None:
            first = int(operands[result][2:])
            written.update(range(first, first + width))
    return found


def of_binary(cubin: bytes) -> list[str]:
    """`unset` and `wrong` of a compiled kernel, disassembled by Triton's nvdisasm."""
    # -ndf: without an analysis of branches, which takes a quarter of the time and changes labels alone
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        done = subprocess.run([str(tool), "-c", "-ndf", str(binary)], capture_output=True, text=True, check=True)
        return [*unset(done.stdout), *wrong(done.stdout)]


def _result(operation: str, operands: list[str]) -> int | None:
    """Which operand is a uniform register that the instruction writes; a carry may stand before it."""
    if operation.startswith(_WRITERS):
        for at, operand in enumerate(operands[:2]):
            if re.fullmatch(r"UR\d+", operand) and (at == 0 or re.match(r"U?P", operands[0])):
                return at
    return None


def _read(operation: str, operands: list[str], width: int) -> set[int]:
    """Uniform registers that a matrix instruction or uniform arithmetic reads."""
    registers: set[int] = set()
    for operand in operands:
        for four in re.findall(r"gdesc\[UR(\d+)\]", operand):  # A's two and B's two; A's are idle where A is registers
            idle = 2 if any(re.fullmatch(r"-?R\d+(?:\.reuse)?", o) for o in operands[1:2]) else 0
            registers.update(range(int(four) + idle, int(four) + 4))
        if operation.startswith("U") and "gdesc" not in operand:
            wide = width if operation.startswith(("UIADD3.64", "UMOV.64")) else 1
            for one in re.findall(r"\bUR(\d+)\b", operand):
                registers.update(range(int(one), int(one) + wide))
    return registers
