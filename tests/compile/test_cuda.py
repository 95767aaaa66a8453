"""Every CUDA kernel compiles for every architecture it declares, with few spills, onto the units it is written for."""

import pytest
from tests.harness import ledger
from tests.jit.cuda_parts import INSTANCES, SPILLED, instance_name

from tilewright.jit.compilers import nvrtc

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(nvrtc.compiler.version() is None, reason=nvrtc.compiler.install()),
]

TARGETS = [
    pytest.param(arch, kernel, params, needs, id=f"{instance_name(kernel)}-{instance_name(params)}-{arch}")
    for kernel, params, needs in INSTANCES
    for arch in kernel.archs
]


@pytest.mark.parametrize(("arch", "kernel", "params", "needs"), TARGETS)
def test_every_instance(arch, kernel, params, needs):
    info = kernel.compile(params, arch).info
    instructions = info["instructions"]
    if arch == "sm_90":  # counted there
        assert needs.items() <= instructions.items()
    assert all(instructions.get(name, 0) >= count for name, count in needs.items()), instructions
    assert info["spill_stores"] <= SPILLED.get(kernel.entry, 0)
    if kernel.entry not in SPILLED:
        assert (info["spill_loads"], info["stack_bytes"]) == (0, 0)
        assert not instructions.keys() & {"LDL", "STL"}
    assert info["warnings"] == [], "the assembler serialised wgmma, or ignored setmaxnreg"
    usage = ledger.Usage(
        kernel.entry, info["registers"], info["spill_stores"], info["shared_bytes"], tuple(sorted(instructions))
    )
    key = f"{kernel.entry}-{instance_name(params)}".replace("torch.", "")
    ledger.check("cuda", f"nvrtc {nvrtc.compiler.version()}", family(kernel), key, arch, [usage])


def family(kernel):
    """The family of ops that a kernel's file lies in; "jit" for kernels of no op."""
    parts = kernel.file.parts
    return parts[parts.index("ops") + 1] if "ops" in parts else "jit"
