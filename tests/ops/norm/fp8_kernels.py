"""For tests of kernels that quantise: outputs in poison, equality of bits, the compiler's intermediate form."""

import re

import torch

from tilewright.ops.quant.layout import TOKEN

POISON = 77


def same(a, b):
    """Bit for bit, NaN included."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))
    )


def outputs(shape, device, guard=64):
    """(q, scales), each in the middle of poison, and a function that says whether the poison around them is intact."""
    n, (*batch, m) = shape[-1], shape[:-1]
    empty = TOKEN.empty(m, n, "meta", *batch)
    room = sum((size - 1) * stride for size, stride in zip(empty.shape, empty.stride(), strict=True)) + 1
    q_memory = torch.full((torch.Size(shape).numel() + 2 * guard,), POISON, dtype=torch.uint8, device=device)
    s_memory = torch.full((room + 2 * guard,), float(POISON), device=device)
    q = q_memory[guard:-guard].view(torch.float8_e4m3fn).view(shape)
    scales = s_memory[guard:].as_strided(empty.shape, empty.stride())

    def intact():
        own = torch.zeros_like(s_memory, dtype=torch.bool)
        own[guard:].as_strided(empty.shape, empty.stride()).fill_(True)
        ends = torch.cat((q_memory[:guard], q_memory[-guard:]))
        return bool((ends == POISON).all() and (s_memory[~own] == POISON).all())

    return q, scales, intact


def lines(kernel, args, constants, num_warps):
    """Its intermediate form for sm_90 with layouts written out, and its shared memory."""
    import triton
    from tests.harness.fake_driver import target

    with target("sm_90") as compiled:
        kernel[(1,)](*args, *constants, num_warps=num_warps)
    (found,) = compiled
    assert isinstance(found, triton.compiler.CompiledKernel)
    text = found.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    for name in sorted(layouts, key=len, reverse=True):
        text = re.sub(rf"{name}\b", layouts[name], text)
    return text.splitlines(), found.metadata.shared
