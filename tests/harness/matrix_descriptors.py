"""Does a Hopper matrix instruction take a descriptor that describes no tile?

A descriptor is two uniform registers: where in shared memory a tile begins, and how it is swizzled with how many bytes
between groups of eight rows.  Triton lays tiles out densely, so the second register is one of three constants, whatever
the kernel.  ptxas (12.8 to 13.4) has been seen to compute both from a register that holds something else, the base of
the shared memory; `uniform_registers` sees only registers that hold nothing.  Constants are followed through the
uniform registers, and those that pass through a vector register, along every branch.
"""

import re
from typing import NamedTuple

SWIZZLES = frozenset({0x40000040, 0x80000020, 0xC0000010})
"""128, 64 and 32 bytes a row: the layout in the upper two bits, eight rows in units of 16 bytes in the lower ones."""

ONE_GROUP = frozenset(how >> 30 << 30 for how in SWIZZLES)
"""The same of a tile of eight rows, which has no next ones."""

_LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@(!?U?P\S+)\s+)?(\S+)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L\S*):")
_TARGET = re.compile(r"`\((\.L\S+)\)")
_BASE = 0x400
"""Where shared memory of a kernel begins on Hopper."""

Value = int | None  # of 32 bits; None: not a constant
State = dict[str, Value]


class Step(NamedTuple):
    """One instruction."""

    text: str
    guard: str | None
    operation: str
    operands: tuple[str, ...]


def wrong(sass: str) -> list[str]:
    """Matrix instructions with a descriptor whose constants are no dense tile's in shared memory."""
    blocks, following = _blocks(sass)
    entry: dict[int, State] = {0: {}}
    waiting, found = [0], dict[str, None]()
    while waiting:
        at = waiting.pop()
        state = dict(entry[at])
        for step in blocks[at]:
            _run(step, state)
        for to in following[at]:
            joined = _joined(entry.get(to), state)
            if joined != entry.get(to):
                entry[to] = joined
                waiting.append(to)
    for at, state in sorted(entry.items()):
        now = dict(state)
        for step in blocks[at]:
            if "gdesc" in step.text and _misled(step, now):
                found[step.text] = None
            _run(step, now)
    return list(found)


def _blocks(sass: str) -> tuple[list[list[Step]], list[set[int]]]:
    """Runs of instructions, and which runs may follow each."""
    blocks: list[list[Step]] = [[]]
    names: dict[str, int] = {}
    for line in sass.splitlines():
        label, match = _LABEL.match(line), _LINE.match(line)
        if label is not None:
            if blocks[-1]:
                blocks.append([])
            names[label[1]] = len(blocks) - 1
        elif match is not None:
            operands = tuple(o.strip().removesuffix(".reuse") for o in match[3].split(","))
            blocks[-1].append(Step(f"{match[2]} {match[3]}", match[1], match[2], operands))
            if match[2].startswith(("BRA", "EXIT", "RET")):
                blocks.append([])
    following: list[set[int]] = []
    for at, block in enumerate(blocks):
        to = {at + 1} & set(range(len(blocks)))
        last = block[-1] if block else None
        if last is not None and last.operation.startswith(("BRA", "EXIT", "RET")):
            to = set() if last.guard is None and "UP" not in last.operands[0] else to
            to |= {names[n] for n in _TARGET.findall(last.text) if n in names}
        following.append(to)
    return blocks, following


def _joined(old: State | None, new: State) -> State:
    """What holds on both ways; a register that one way does not know is not there."""
    if old is None:
        return dict(new)
    return {name: old[name] if old[name] == new[name] else None for name in old if name in new}


def _misled(step: Step, state: State) -> bool:
    for first in map(int, re.findall(r"gdesc\[UR(\d+)\]", step.text)):
        from_registers = bool(re.fullmatch(r"-?R\d+", step.operands[1]))
        for low in (first + 2,) if from_registers else (first, first + 2):
            where, how = state.get(f"UR{low}", 0), state.get(f"UR{low + 1}", 0)
            known = SWIZZLES | ONE_GROUP if "64x8x" in step.operation and low > first else SWIZZLES
            if (how is not None and how not in known) or (where is not None and where & 0x3FFF < _BASE >> 4):
                return True
    return False


def _run(step: Step, state: State) -> None:
    """What `step` does to the registers that are followed."""
    result = _result(step)
    if result is None:
        return
    name, carry = result
    before = dict(state)
    made, carried = _computed(step, state)
    for at, value in enumerate(made):
        state[_next(name, at)] = value
    if carry is not None:
        state[carry] = carried
    if step.guard is not None:  # it may not have happened
        for register in (*(_next(name, at) for at in range(len(made))), *([carry] if carry else [])):
            if register in before and before[register] != state[register]:
                state[register] = None


def _result(step: Step) -> tuple[str, str | None] | None:
    """The first register written, and the predicate of a carry beside it; None where nothing followed is."""
    operands = step.operands
    if step.operation.startswith(("ST", "RED", "HGMMA", "BRA", "EXIT", "SYNCS", "UTMA", "BAR", "WARP")):
        return None
    if re.fullmatch(r"U?R\d+", operands[0]):
        carry = operands[1] if len(operands) > 1 and re.fullmatch(r"UP\d", operands[1]) else None
        return operands[0], carry
    return (
        (operands[1], operands[0])
        if re.fullmatch(r"UP\d", operands[0]) and len(operands) > 1 and re.fullmatch(r"UR\d+", operands[1])
        else None
    )


def _next(name: str, at: int) -> str:
    kind, number = re.fullmatch(r"(U?R)(\d+)", name).groups()  # type: ignore[union-attr]
    return f"{kind}{int(number) + at}"


def _computed(step: Step, state: State) -> tuple[list[Value], Value]:
    """The registers that `step` writes, and its carry."""
    operation, operands = step.operation, [o for o in step.operands[1:] if not re.fullmatch(r"UP\d", o)]
    read = [_value(o, state) for o in operands]
    known = all(v is not None for v in read)
    if operation in ("UMOV", "MOV", "R2UR", "IMAD.U32", "IMAD.MOV.U32", "MOV.SPILL"):
        return [read[-1]], None
    if operation == "S2UR" and operands[-1] == "SR_CgaCtaId":
        return [0], None
    if operation in ("UIADD3", "UIADD3.X"):
        carry_in: Value = 0
        if operation == "UIADD3.X":
            (of, *_) = [o for o in step.operands[1:] if re.fullmatch(r"!?UP[T\d]", o)]
            carry_in = state.get(of)
            read = read[:3]
        if any(v is None for v in read) or carry_in is None:
            return [None], None
        total = sum(v & 0xFFFFFFFF for v in read if v is not None) + carry_in
        return [total & 0xFFFFFFFF], total >> 32
    if operation in ("UIADD3.64", "UMOV.64"):
        return _wide(operands, state), None
    if operation.startswith("USHF") and known:
        low, by, high = (v & 0xFFFFFFFF for v in read if v is not None)
        if operation == "USHF.L.U32":
            return [(low << by) & 0xFFFFFFFF], None
        if operation == "USHF.R.U32.HI":
            return [(high >> by) & 0xFFFFFFFF], None
    if operation == "USGXT.U32" and known:
        return [read[0] & ((1 << read[1]) - 1)], None  # type: ignore[operator]
    if operation == "ULEA" and known and len(read) == 3:
        return [((read[0] << read[2]) + read[1]) & 0xFFFFFFFF], None  # type: ignore[operator]
    if operation == "ULOP3.LUT" and known:
        a, b, c, table = (v & 0xFFFFFFFF for v in read[:4] if v is not None)
        return [_bits(a, b, c, table)], None
    wide = 4 if ".128" in operation else 2 if re.search(r"64|WIDE|U16x2|88\.4", operation) else 1
    return [None] * max(wide, 4 if "LDSM" in operation else 1), None


def _bits(a: int, b: int, c: int, table: int) -> int:
    made = 0
    for place in range(8):
        if table >> place & 1:
            made |= (a if place & 4 else ~a) & (b if place & 2 else ~b) & (c if place & 1 else ~c)
    return made & 0xFFFFFFFF


def _wide(operands: list[str], state: State) -> list[Value]:
    """A sum of numbers of 64 bits: pairs of registers, and constants."""
    total = 0
    for operand in operands:
        sign, name = (-1, operand[1:]) if operand.startswith("-UR") else (1, operand)
        if name == "URZ":
            continue
        if match := re.fullmatch(r"UR(\d+)", name):
            low, high = state.get(name), state.get(f"UR{int(match[1]) + 1}")
            if low is None or high is None:
                return [None, None]
            total += sign * (low | high << 32)
        else:
            value = _value(name, state)
            if value is None:
                return [None, None]
            total += value
    return [total & 0xFFFFFFFF, total >> 32 & 0xFFFFFFFF]


def _value(operand: str, state: State) -> Value:
    if operand in ("URZ", "RZ", "SRZ"):
        return 0
    if re.fullmatch(r"-?0x[0-9a-f]+", operand):
        return int(operand, 16)
    if match := re.fullmatch(r"-(U?R\d+)", operand):
        of = state.get(match[1])
        return None if of is None else -of & 0xFFFFFFFF
    if re.fullmatch(r"U?R\d+", operand):
        return state.get(operand)
    return None
