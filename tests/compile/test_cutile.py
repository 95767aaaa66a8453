"""Every cuTile implementation, in every dtype and shipped configuration, compiles well for every target.

What is compiled is what would be launched: the implementation's own `launch` inside `collect`.  A spill, a row that is
loaded through the TMA, or a product that is not, is an error.
"""

from functools import cache

import pytest
import torch
from tests.harness import ledger
from tests.harness.cases import call_that_selects, declared_calls

import tilewright.ops  # noqa: F401 - binds every contract
from tilewright.dispatch import contracts, implementations
from tilewright.jit.collect import collect
from tilewright.jit.compilers import tileiras

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(tileiras.compiler.version() is None, reason=tileiras.compiler.install()),
]

ARCHITECTURES = ("sm_90", "sm_100", "sm_120")
WHOLE = "sm_90"
# Bytes of stack a thread.  At N=8192 the backward of add_rms_norm holds four rows; ptxas for sm_120 misses by a little.
# Operands that are not aligned come element by element through registers, which sm_120 needs for the accumulator: its
# matrix unit reads nothing else.  Aligned products spill nowhere, says tests/ops/gemm.
# Attention's tiles are chosen for sm_90; other matrix units leave less room beside them.
ALLOWED = {
    ("rms_norm_backward_kernel", "sm_120"): 16,
    ("gemm_kernel", "sm_120"): 1136,
    ("fmha_forward_kernel", "sm_120"): 1136,
    ("fmha_queries_kernel", "sm_120"): 1136,
    ("fmha_keys_kernel", "sm_120"): 1728,
    ("fmha_keys_kernel", "sm_100"): 1728,
}
# One engine multiplies for several ops, and tests/ops/gemm compiles its configurations: here are the forms of a call,
# by the first words of their cases: layouts, few rows, epilogues, results of float32, operands that are not aligned.
# Attention's tiles are tuned for `WHOLE`; for the others the plainest case, a program over scores, the widest heads.
ATTENTION = (
    "8x16x2048x128_causal",
    "2x16x8192x128_full",
    "1x32/8x16384x128_causal",
    "4x32x4096x64_causal",
    "sides",
    "alibi",
    "d_256",
)
PRODUCTS = {
    "matmul": (
        "llama8b_qkv_m4096",
        "llama8b_qkv_m8",
        "llama8b_qkv_dgrad",
        "llama8b_qkv_wgrad",
        "llama8b_gate_up_swiglu_m4096",
        "gpt_up_bias_gelu_m4096",
        "odd_sizes",
        "tt",
        "scale",
    ),
    "bmm": ("mla_absorb_m64", "experts_m4096"),
    "fmha": ATTENTION,
    "fmha_bwd": ATTENTION,
}
IMPLEMENTATIONS = {
    op.key: (contract, op, implementation)
    for contract in contracts().values()
    for op in contract.raw_ops
    if (implementation := implementations(op.op, op.direction).get("cutile")) is not None
}


ATTENTION_ELSEWHERE = ("8x16x2048x128_causal", "alibi", "d_256")


@cache
def calls(key, whole):
    """(call, config): every shipped configuration, the first workload in each dtype, what needs masks in float32; of a
    product, what `PRODUCTS` says.  Where not `whole`, other dtypes than the first of their width are left out.
    """
    contract, op, implementation = IMPLEMENTATIONS[key]
    if key in PRODUCTS:
        declared = {c.purpose.partition(":")[0]: c for c in declared_calls(contract, op, torch.bfloat16)}
        names = PRODUCTS[key] if whole or PRODUCTS[key] is not ATTENTION else ATTENTION_ELSEWHERE
        chosen = [declared[name] for name in names]
        return [(c, implementation.configure(op.bucket_of(c.args, "default"), torch.bfloat16)) for c in chosen]
    found = [(call_that_selects(contract, op, c, implementation), c) for c in implementation.configs]
    for dtype in contract.dtypes:
        if not whole and dtype != contract.dtypes[0] and dtype.itemsize == contract.dtypes[0].itemsize:
            continue  # the same registers and the same memory
        declared = declared_calls(contract, op, dtype)
        masked = [c for c in declared if c.purpose.startswith(("odd_n", "long_row", "interleaved_partial"))]
        for call in (declared[0], *(masked if dtype == torch.float32 else ())):
            found.append((call, implementation.configure(op.bucket_of(call.args, "default"), dtype)))
    return found


def artifacts(key, arch, exhaustive):
    """Compiled kernels; by default one of each kernel for other GPUs than `WHOLE`."""
    implementation = IMPLEMENTATIONS[key][2]
    with collect(arch) as collector:
        for call, config in calls(key, arch == WHOLE):
            implementation.launch(call.outputs(), *call.args, config=config)
    jobs = collector.jobs
    if arch != WHOLE and not exhaustive:
        jobs = list({job.name: job for job in reversed(jobs)}.values())
    return [job.compile() for job in jobs]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("key", IMPLEMENTATIONS)
def test_every_shipped_configuration(key, arch, exhaustive):
    made = artifacts(key, arch, exhaustive)
    assert made
    faults = []
    for artifact in made:
        info, what = artifact.info, f"{artifact.key.name} {' '.join(artifact.key.flags)}"
        if max(info["spills"], info["stack_bytes"]) > ALLOWED.get((artifact.key.name, arch), 0):
            faults.append(f"{what}: {info['spills']} spills, {info['stack_bytes']} bytes of stack")
        workers = 32 * (8 if "num_worker_warps=8" in artifact.key.flags else 4)
        if key in PRODUCTS:
            faults += [f"{what}: {fault}" for fault in product_faults(info, arch, workers)]
            continue
        if info["instructions"].keys() & {"UTMALDG", "UTMASTG"}:
            faults.append(f"{what}: rows go through the TMA, which reads them at a third of the speed")
        if info["threads"] != workers:
            faults.append(f"{what}: {info['threads']} threads; tileiras added warps that move data")
    assert not faults, "\n".join(faults)
    known = f"tileiras {tileiras.compiler.version()}", IMPLEMENTATIONS[key][0].family, key, arch
    ledger.check("cutile", *known, map(usage, made), whole=exhaustive or arch == WHOLE)


def product_faults(info, arch, workers):
    """A product is multiplied by matrix units; on sm_90 a group of warps of its own loads, unless registers must."""
    if arch == "sm_90" and not info["instructions"].keys() & {"HGMMA", "QGMMA"}:
        yield f"no warpgroup multiplies: {info['instructions']}"
    loading = (0, 128, 256) if arch == "sm_100" else (0, 128)  # threads beside them, which load, and start products
    if info["threads"] - workers not in loading:
        yield f"{info['threads']} threads for {workers} that multiply"


def usage(artifact):
    info = artifact.info
    names = tuple(sorted(info["instructions"].keys() - {"LDL", "STL"}))
    return ledger.Usage(artifact.key.name, info["registers"], info["spills"], info["shared_bytes"], names)


def test_there_is_something_to_compile():
    """An empty parametrisation would pass silently."""
    forward = {"rms_norm", "add_rms_norm", "silu_and_mul", "swiglu", "softmax", "apply_rope"}
    assert forward <= set(IMPLEMENTATIONS)
