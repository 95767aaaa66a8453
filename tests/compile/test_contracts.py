"""Every Triton implementation, in every dtype and shipped configuration, compiles well for every target.

What is compiled is what would be launched: the implementation's own `launch`, given the arguments that the public
function makes of each workload and edge case, with the configurations `configure` picks there, all that are listed as
shipped, and those of the committed tuning tables.

By default `each_kernel` compiles what finds most: for `WHOLE`, the GPU that kernels are tuned for, each configuration
once, for the others each kernel once.  With `--exhaustive` `every_form` compiles the rest: for `WHOLE` every case; for
the others each configuration once, and each other width of dtype once.  Kernels without `tl.dot` are the same code for
GPUs that are `RELATED`: there each kernel once, and each width of dtype once.  Of ops that are `SAMPLED` every GPU has
each configuration once, and once more with terms of scores.

A spill, or a `tl.dot` that lost the matrix units, is an error, and so is a difference from the committed ledger of what
each kernel costs: exactly with `--exhaustive`, and never more than it says otherwise.
"""

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from tests.harness import ledger
from tests.harness.cases import RawCall, call_that_selects, declared_calls, triton_implementations

import tilewright
from tilewright.dispatch import contracts
from tilewright.dispatch.tables import table
from tilewright.dispatch.tables.configs import from_row
from tilewright.validate.layouts import misaligned

pytestmark = pytest.mark.compile

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
WHOLE = "sm_90"
# Of one maker, with as many registers; what fits the other's shared memory is asserted to fit here
RELATED = {"sm_80": "sm_90", "sm_100": "sm_90", "gfx950": "gfx942"}
# A hundred cases of masks and modifiers each, of kernels that take seconds to compile
SAMPLED = {"fmha", "fmha_dropout", "fmha_varlen", "mla"}
# The kernel, and bytes that a thread moves: in tiles of 32 queries and 64 keys of packed sequences, D = 128, the
# fastest on an H200; in tiles of 64 keys of 576 numbers, 599 us on an H100 where 32 keys took 735.  Products with
# transposed weights of 2880 columns spill only there, and were measured nowhere yet, as the masks of a tile and its
# mirror, in AMD's scalar registers.  For the others ptxas keeps to 64, 96 or 128 registers of 255
MEASURED_SPILLS = {
    ("fmha_bwd", "sm_90"): ("keys_kernel", 16),
    ("fmha_varlen_bwd", "sm_90"): ("keys_kernel", 16),
    ("fmha_decode", "sm_90"): ("attend_kernel", 8),
    ("mla_decode", "sm_90"): ("attend_kernel", 256),
    ("mla_decode", "sm_80"): ("attend_kernel", 32),
    ("mla_decode", "sm_100"): ("attend_kernel", 24),
    ("fused_moe_bias", "sm_100"): ("grouped_rows_kernel", 28),
    ("fused_moe_bias_bwd", "sm_100"): ("grouped_rows_kernel", 28),
    ("symmetric_matmul", "gfx942"): ("symmetric_kernel", 192),
    ("symmetric_matmul", "gfx950"): ("symmetric_kernel", 192),
}
# The same for compilers that the ledger is not of, which schedule a few kernels otherwise (docs/versions.md)
OTHER_COMPILERS_SPILLS = {
    ("3.7", "rms_norm_fp8", "sm_100"): 16,
    ("3.8", "rms_norm_fp8", "sm_90"): 16,
    ("3.8", "rms_norm_bwd", "sm_90"): 24,
}
TRITON = version("triton")
IMPLEMENTATIONS = {op.key: (contract, op, impl) for contract, op, impl in triton_implementations()}
TABLES = sorted((Path(tilewright.__file__).parent / "tables").glob("*/*.json"))


class Compiler:
    """Launches raw calls inside a fake driver and collects the faults of all kernels that were compiled."""

    def __init__(self, implementation, arch):
        from tests.harness.fake_driver import target

        self.implementation, self.arch, self._target = implementation, arch, target
        self.launched = 0
        self.faults = []
        self.usages = []
        self.multiplies = False

    def __enter__(self):
        self._block = self._target(self.arch)
        self.compiled = self._block.__enter__()
        return self

    def __exit__(self, *error):
        self._block.__exit__(*error)

    def refused(self, call: RawCall) -> bool:
        refuses = self.implementation.supports
        return refuses is not None and refuses(*call.args) is not None

    def kernels(self, call: RawCall, config) -> set[str]:
        """Names of the kernels that `call` launches; nothing is compiled."""
        from triton.runtime.jit import JITFunction

        names: set[str] = set()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JITFunction, "run", lambda kernel, *_, **__: names.add(kernel.fn.__name__))
            self.implementation.launch(call.outputs(), *call.args, config=config)
        return names

    def repeats(self, call: RawCall, config) -> bool:
        """Whether `call` launches, on a related GPU, nothing but kernels without `tl.dot` that are compiled already."""
        if self.arch not in RELATED or self.multiplies or self.refused(call):
            return False
        return self.kernels(call, config) <= {usage.kernel for usage in self.usages}

    def launch(self, call: RawCall, dtype, config) -> bool:
        """Whether the implementation takes `call`, which is then compiled."""
        from tests.harness.fake_driver import LIMITS
        from tests.harness.resources import resources

        if self.refused(call):
            return False
        seen = len(self.compiled)
        case = f"{call.op.key} {dtype}, {call.purpose}, {config}"
        try:
            self.implementation.launch(call.outputs(), *call.args, config=config)
        except Exception as error:
            error.add_note(f"while compiling {case} for {self.arch}")
            raise
        self.launched += 1
        # A product of float32 operands that keeps their precision is one of scalars: NVIDIA's matrix units round them
        scalar = dtype == torch.float32 and self.arch.startswith("sm_")
        for found in map(resources, self.compiled[seen:]):
            self.multiplies |= found.multiplies
            spilled = found.spilled
            kernel, most = MEASURED_SPILLS.get((call.op.key, self.arch), ("", 0))
            if 0 < found.spilled <= most and found.name == kernel:
                found = replace(found, spilled=0)
            if found.spilled <= OTHER_COMPILERS_SPILLS.get((TRITON.rpartition(".")[0], call.op.key, self.arch), 0):
                found = replace(found, spilled=0)
            faults = [fault for fault in found.faults() if not (scalar and "no matrix instruction" in fault)]
            self.faults += [f"{case}: {fault}" for fault in faults]
            numbers = (found.registers, spilled, found.shared_bytes)
            self.usages.append(ledger.Usage(found.name, *numbers, found.matrix_instructions))
            least = min((LIMITS[a].shared_bytes for a, of in RELATED.items() if of == self.arch), default=None)
            if least is not None and not found.multiplies and found.shared_bytes > least:
                self.faults.append(f"{case}: {found.name} has more shared memory than related GPUs have")
        return True


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("key", IMPLEMENTATIONS)
def test_every_workload_and_shipped_configuration(key, arch, exhaustive):
    contract, op, implementation = IMPLEMENTATIONS[key]
    with Compiler(implementation, arch) as compiler:
        (every_form if exhaustive else each_kernel)(contract, op, compiler)
    assert compiler.launched > 0
    assert compiler.compiled
    assert compiler.faults == [], "\n".join(compiler.faults)
    known = f"triton {TRITON}", contract.family, key, arch
    ledger.check("triton", *known, compiler.usages, whole=exhaustive)


def each_kernel(contract, op, compiler):
    """For `WHOLE` every configuration once, and once in every other width of dtype; for the others every kernel once.
    Attention's kernels once more with terms of scores.  `every_form` compiles these forms too, and others.
    """
    implementation, whole, sampled = compiler.implementation, compiler.arch == WHOLE, contract.name in SAMPLED
    seen, compiled = set(), set()

    def launch(call, dtype, config, terms):
        kernels = {(name, terms) for name in compiler.kernels(call, config)}
        if whole or not kernels <= compiled:
            compiler.launch(call, dtype, config)
            compiled.update(kernels)

    for dtype in _widths(contract) if whole else contract.dtypes[:1]:
        calls = declared_calls(contract, op, dtype)
        for call in (*calls, *map(_shifted, calls)) if sampled else calls:
            config = implementation.configure and implementation.configure(op.bucket_of(call.args, "default"), dtype)
            terms = sampled and _with_terms(op, call)
            if (dtype, config, terms) in seen:
                continue
            if not compiler.refused(call):
                launch(call, dtype, config, terms)
            elif whole or sampled:
                continue
            seen.add((dtype, config, terms))
    configs = {config for _, config, _ in seen}
    for config in () if sampled else implementation.configs:
        if config not in configs:
            call = call_that_selects(contract, op, config, implementation)
            if not compiler.refused(call):
                launch(call, call.args[0].dtype, config, False)


def _widths(contract):
    """The first dtype of each width: others need the same registers and the same memory."""
    return list({dtype.itemsize: dtype for dtype in reversed(contract.dtypes)}.values())[::-1]


def every_form(contract, op, compiler):
    """Every case for `WHOLE`, every configuration once for the others; see above."""
    implementation, arch, first = compiler.implementation, compiler.arch, contract.dtypes[0]
    configs, compiled_once = set(), set()
    for dtype in contract.dtypes:
        same_width = dtype != first and dtype.itemsize == first.itemsize  # the same registers and the same memory
        if same_width and (arch != WHOLE or contract.name in SAMPLED):
            continue
        calls = declared_calls(contract, op, dtype)
        for call in (*calls, *map(_shifted, calls)) if contract.name in SAMPLED else calls:
            config = None
            if implementation.configure is not None:
                config = implementation.configure(op.bucket_of(call.args, "default"), dtype)
            if contract.name in SAMPLED:
                form = (dtype, config, _with_terms(op, call))
                if form not in compiled_once and compiler.launch(call, dtype, config):
                    compiled_once.add(form)
                    configs.add(config)
                continue
            every_case = arch == WHOLE and dtype == first
            # A wider dtype once for each shape of a kernel, where the first is compiled for every case
            shape = None if arch != WHOLE or same_width else (config, op.bucket_of(call.args, "batch_invariant"))
            new = (dtype, shape) not in compiled_once
            new = new or (config not in configs and not compiler.repeats(call, config))
            if (every_case or new) and compiler.launch(call, dtype, config):
                compiled_once.add((dtype, shape))
            configs.add(config)
    # Declared cases of sampled ops, misaligned ones too, select what is shipped; kernels of `fmha` serve the others
    for config in () if contract.name in SAMPLED else implementation.configs:
        if config not in configs:
            call = call_that_selects(contract, op, config, implementation)
            if not compiler.repeats(call, config):
                compiler.launch(call, call.args[0].dtype, config)


def _shifted(call: RawCall) -> RawCall:
    """The same for operands that begin one element behind an aligned address."""
    args = tuple(misaligned(a) if isinstance(a, torch.Tensor) and a.dim() == 4 else a for a in call.args)
    return call._replace(purpose=f"{call.purpose}, misaligned", args=args)


def _with_terms(op, call) -> bool:
    """Are the scores of attention changed, or masked by a program?"""
    from tilewright.ops.attention.kernels.triton.tiles import has_terms

    of = dict(zip(op.bucket_names, op.bucket_of(call.args, "default"), strict=True))
    return has_terms(of["mask"], of.get("extras", 0))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_row_of_a_shipped_table(path, exhaustive):
    """By default a configuration once for all rows that have it."""
    header, rows = table.read(path)
    faults, compiled = [], set()
    for row in rows:
        key = row.op if row.direction == "fwd" else f"{row.op}_{row.direction}"
        if row.backend != "triton" or header["arch"] not in ARCHITECTURES:
            continue
        contract, op, implementation = IMPLEMENTATIONS[key]
        dtype = getattr(torch, row.dtype)
        calls = [c for c in declared_calls(contract, op, dtype) if op.bucket_text(op.bucket(*c.args)) == row.bucket]
        assert calls, f"{path}: no workload of {key} has the bucket {row.bucket}"
        form = (key, row.dtype, str(row.config))
        if form in compiled and not exhaustive:
            continue
        compiled.add(form)
        bucket = op.bucket(*calls[0].args)
        config = from_row(implementation, row.config, bucket, dtype) if row.config is not None else None
        with Compiler(implementation, header["arch"]) as compiler:
            compiler.launch(calls[0], dtype, config)
        faults += compiler.faults
    assert faults == []


def test_there_is_something_to_compile():
    """An empty parametrisation would pass silently."""
    assert "rms_norm" in IMPLEMENTATIONS
    assert "rms_norm_bwd" in IMPLEMENTATIONS
    in_triton = {name for name, c in contracts().items() if any(k.startswith("triton.") for k in c.forward.kernels)}
    assert {contract.name for contract, _, _ in IMPLEMENTATIONS.values()} == in_triton
    made_of_others = {name for name, c in contracts().items() if c.forward.compose is not None}
    assert set(contracts()) - in_triton == {"fused_moe_fp8", *made_of_others}  # whose Triton is for Hopper alone
