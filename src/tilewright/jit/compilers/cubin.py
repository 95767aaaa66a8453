"""Facts about the kernel in a cubin, read from the file itself: no cuobjdump, no driver, no GPU.

A cubin is an ELF file.  `.text.<kernel>` holds the instructions, `.nv.shared.<kernel>` has the size of its static
shared memory, and `.nv.info` (of all functions) and `.nv.info.<kernel>` hold attributes: one byte of format, one of
name, two of size, then the value.  Their names are documented only by the output of cuobjdump, which the tests compare.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from tilewright.errors import BackendError

_SIZED = 4  # attribute formats: 4 is followed by `size` bytes, the others keep their value in those two bytes
_REQUIRED_THREADS, _FRAME_SIZE, _PARAMETER, _REGISTERS = 0x10, 0x11, 0x17, 0x2F  # EIATTR_*
_PARAMETER_2 = 0x45  # how a kernel with tensor maps among its parameters describes them
_NO_BITS = 8  # section type: occupies no space in the file
_RESERVED_SHARED = 1024  # bytes of each block that the system keeps, from sm_90 on; marked by a section
_INSTRUCTION_BYTES = 16  # since Volta

# The low nine bits of an instruction are its opcode; the three above distinguish registers from constants.  These show
# which units a kernel uses: matrix units (the warpgroup's, then the warp's), the TMA (load, store, reduce), and local
# memory, where spills go.
_OPCODES = {
    0x1F0: "HGMMA",
    0x1F3: "QGMMA",
    0x1F1: "IGMMA",
    0x03C: "HMMA",
    0x037: "IMMA",
    0x1B4: "UTMALDG",
    0x1B5: "UTMASTG",
    0x1B6: "UTMAREDG",
    0x183: "LDL",
    0x187: "STL",
}


class Facts(NamedTuple):
    """What a cubin tells about its kernel.

    registers, stack_bytes: per thread.  shared_bytes (static), threads: per block; threads is 0 if a launch may choose.
    parameters: bytes of each.  instructions: counts in the code.
    """

    symbol: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    threads: int
    parameters: tuple[int, ...]
    instructions: dict[str, int]

    @property
    def spills(self) -> int:
        """Number of instructions that access local memory, which holds spilled registers and arrays."""
        return self.instructions.get("LDL", 0) + self.instructions.get("STL", 0)


class _Section(NamedTuple):
    data: bytes
    size: int  # differs from len(data) if the file holds no bytes of it, as for shared memory


_ABSENT = _Section(b"", 0)


def facts(cubin: bytes) -> Facts:
    """Facts about the only kernel of `cubin`.  Raises BackendError unless it is an ELF file with one kernel."""
    sections = dict(_sections(cubin))
    kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    if len(kernels) != 1:
        raise BackendError(f"a cubin holds {len(kernels)} kernels ({', '.join(kernels)}), must hold exactly one.")
    (symbol,) = kernels
    kernel_attributes = list(_attributes(sections.get(f".nv.info.{symbol}", _ABSENT).data))
    all_attributes = list(_attributes(sections.get(".nv.info", _ABSENT).data))
    parameters = dict(
        _parameter(name, value) for name, value in kernel_attributes if name in (_PARAMETER, _PARAMETER_2)
    )
    required = [struct.unpack("<3I", value) for name, value in kernel_attributes if name == _REQUIRED_THREADS]
    x, y, z = required[0] if required else (0, 0, 0)
    shared = sections.get(f".nv.shared.{symbol}", _ABSENT).size
    return Facts(
        symbol=symbol,
        registers=_largest(all_attributes, _REGISTERS),
        stack_bytes=_largest(all_attributes, _FRAME_SIZE),
        shared_bytes=max(0, shared - _RESERVED_SHARED * (".nv.shared.reserved.0" in sections)),
        threads=x * y * z,
        parameters=tuple(parameters[i] for i in sorted(parameters)),
        instructions=_instructions(sections[f".text.{symbol}"].data),
    )


def resources(cubin: bytes) -> dict[str, Any]:
    """The numbers among `facts`: registers, stack_bytes, shared_bytes, threads."""
    numbers = facts(cubin)._asdict()
    return {name: numbers[name] for name in ("registers", "stack_bytes", "shared_bytes", "threads")}


def _instructions(code: bytes) -> dict[str, int]:
    words = struct.unpack_from(f"<{len(code) // 8}Q", code)[:: _INSTRUCTION_BYTES // 8]
    counts = Counter(_OPCODES.get(word & 0x1FF) for word in words)
    return {name: counts[name] for name in _OPCODES.values() if counts[name]}


def _parameter(form: int, value: bytes) -> tuple[int, int]:
    """(position, bytes) of a kernel parameter."""
    _, position, _, packed = struct.unpack("<IHHI", value)
    return position, packed & 0xFFFF if form == _PARAMETER_2 else packed >> 18


def _largest(attributes: list[tuple[int, bytes]], attribute: int) -> int:
    """The largest number that any function has for `attribute`, whose values are (symbol, number)."""
    return max((struct.unpack("<2I", value)[1] for name, value in attributes if name == attribute), default=0)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + 4 <= len(info):
        form, name, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form == _SIZED:
            yield name, info[offset : offset + size]
            offset += size


def _sections(elf: bytes) -> Iterator[tuple[str, _Section]]:
    if elf[:5] != b"\x7fELF\x02":
        raise BackendError("not a cubin: a 64-bit ELF file is expected.")
    table, size, count, names = struct.unpack_from("<40xQ10xHHH", elf)
    headers = [struct.unpack_from("<II16xQQ", elf, table + i * size) for i in range(count)]
    strings = headers[names][2]
    for name, kind, offset, length in headers:
        start = strings + name
        text = elf[start : elf.index(b"\0", start)].decode()
        yield text, _Section(b"" if kind == _NO_BITS else elf[offset : offset + length], length)
