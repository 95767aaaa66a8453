"""Compile one specialisation of a Triton kernel for a named GPU, on any machine, into the kernel cache.

Triton specialises on argument types, on pointers and integers that are multiples of 16, on integers equal to 1 and on
every constexpr.  `request` runs Triton's own binder for a target that need not be present, and turns the result into a
cache key.  The key holds text only: the sources of the kernel and of every jit function it calls, types, constants and
options.  It has no line numbers, paths or Python version, so that a machine with a GPU finds what one without a GPU has
compiled.

The launch ABI of Triton 3.6 on NVIDIA: the parameters that are neither constexpr nor specialised away, in order, then
two scratch pointers that are null for the kernels accepted here; 32 * num_warps threads; dynamic shared memory.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITCallable, JITFunction, MockTensor, create_function_from_signature

from tilewright.errors import BackendError
from tilewright.jit.artifact import BuildKey, Built
from tilewright.settings import current

SUPPORTED = triton.__version__.startswith("3.6.")
"""Is this the Triton whose specialisation and launch ABI are written above and in `triton_launch`?"""

# Triton's type names as `driver.Launch` letters; a parameter of any other type is refused
_LETTERS = {"i1": "?", "u1": "?", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}
_BYTES = {"P": 8, "?": 1, "i": 4, "q": 8, "f": 4, "d": 8}
_SCRATCH = "PP"  # global and profile scratch, after all parameters


class Request(NamedTuple):
    """A specialisation: its cache key, and the function that compiles it."""

    key: BuildKey
    build: Callable[[], Built]


def aligned(args: Sequence[Any]) -> tuple[Any, ...]:
    """`args` with mock tensors, whose pointers count as multiples of 16: fake tensors have no pointers."""
    return tuple(MockTensor(a.dtype) if isinstance(a, Tensor) else a for a in args)


def request(fn: JITFunction, arch: str, args: Sequence[Any], constants: Sequence[Any], **options: Any) -> Request:
    """The specialisation that `fn[grid](*args, *constants, **options)` needs on `arch` ("sm_90", "gfx942")."""
    if not SUPPORTED:
        raise BackendError(
            f"Triton {triton.__version__} cannot be compiled ahead of time here; the launch ABI is known for 3.6. "
            "pip install 'triton==3.6.*'"
        )
    gpu = target(arch)
    backend = make_backend(gpu)
    options = {"debug": fn.debug or False, "instrumentation_mode": "", **options}
    bound, specialised, _ = _binder(fn, arch)(*args, *constants, **options)
    parsed, signature, constexprs, attrs = fn._pack_args(backend, options, bound, specialised, None)
    key = BuildKey(
        name=fn.__name__,
        kind="triton",
        arch=arch,
        flags=(
            *(
                f"{name}: {kind}{_hints(attrs.get((i,), ()))}"
                for i, (name, kind) in enumerate(signature.items())
                if kind != "constexpr"
            ),
            *(f"{fn.arg_names[path[0]]}{list(path[1:]) or ''} = {_text(value)}" for path, value in constexprs.items()),
            *(f"--{name}={value}" for name, value in sorted(vars(parsed).items()) if name != "extern_libs"),
        ),
        source=source(fn),
        compiler=f"triton {triton.__version__}",
        suffix=backend.binary_ext,
        source_suffix="py",
    )
    return Request(key, lambda: _build(ASTSource(fn, signature, constexprs, attrs), gpu, vars(parsed)))


def target(arch: str) -> GPUTarget:
    """Triton's target for an architecture."""
    if match := re.fullmatch(r"sm_(\d+)", arch):
        return GPUTarget("cuda", int(match[1]), 32)
    if re.fullmatch(r"gfx[0-9a-f]+", arch):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    raise BackendError(f"Triton has no target {arch!r}; examples: sm_80, sm_90, sm_100, gfx942, gfx950.")


@cache
def source(fn: JITCallable) -> str:
    """The text that determines what `fn` computes: the global constants and jit functions it uses, then itself."""
    texts: dict[str, str] = {}
    _gather(fn, texts)
    return "\n\n".join(texts.values())


def _gather(fn: JITCallable, texts: dict[str, str]) -> None:
    """Add the sources of `fn` and of all that it uses to `texts`, callees before callers."""
    path = f"{fn.__module__}.{fn.__qualname__}"
    if path in texts:
        return
    texts[path] = ""  # a function may call itself
    scope = fn.get_capture_scope()
    for value, name in _references(fn.parse(), scope):
        if isinstance(value, JITCallable):
            if not value.__module__.startswith("triton."):  # the key's compiler version covers Triton's own
                _gather(value, texts)
        elif isinstance(value, bool | int | float | str | triton.language.constexpr):
            texts[f"{fn.__module__} {name}"] = f"{name} = {_text(value)}"
    del texts[path]
    texts[path] = fn.src.rstrip()


def _references(tree: ast.AST, scope: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """The globals that a function's text names, with their names; also attributes of modules."""
    references = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            references.append((scope[node.id], node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in scope:
            references.append((getattr(scope[node.value.id], node.attr, None), f"{node.value.id}.{node.attr}"))
    return references


@cache
def _binder(fn: JITFunction, arch: str) -> Callable[..., Any]:
    binder: Callable[..., Any] = create_function_from_signature(fn.signature, fn.params, make_backend(target(arch)))
    return binder


def _hints(attrs: Sequence[Sequence[Any]]) -> str:
    return "".join(f" {name.removeprefix('tt.')}={value}" for name, value in attrs)


def _text(value: Any) -> str:
    """A constant as text that is equal in every process."""
    if isinstance(value, JITCallable):
        return source(value)
    if isinstance(value, triton.language.constexpr):
        return f"constexpr({_text(value.value)})"
    return str(value) if isinstance(value, triton.language.dtype) else repr(value)


def _build(ast_source: ASTSource, gpu: GPUTarget, options: Mapping[str, Any]) -> Built:
    compiled = triton.compile(ast_source, target=gpu, options=dict(options))
    metadata = compiled.metadata
    info = {"symbol": compiled.name, "num_warps": metadata.num_warps, "shared_bytes": metadata.shared}
    files = {}
    if gpu.backend == "hip":
        return Built(compiled.kernel, {**info, **_amd_resources(compiled.asm["amdgcn"])}, {})
    if current().jit_dump_ptx:
        files["ptx"] = compiled.asm["ptx"].encode()
    return Built(compiled.kernel, {**info, **_nvidia_launch(compiled)}, files)


def _nvidia_launch(compiled: Any) -> dict[str, Any]:
    """Registers, and what a launch without Triton needs.  Raises BackendError if only Triton can launch the kernel."""
    from tilewright.jit.compilers.cubin import facts

    metadata, name = compiled.metadata, compiled.name
    for field, default in (
        ("num_ctas", 1),
        ("launch_cooperative_grid", False),
        ("profile_scratch_size", 0),
    ):
        if getattr(metadata, field, default) != default:
            raise BackendError(
                f"{name} has {field}={getattr(metadata, field)}, which only Triton's own launcher serves."
            )
    parameters = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    if odd := {name: kind for name, kind in parameters.items() if kind[0] != "*" and kind not in _LETTERS}:
        raise BackendError(f"{name} has parameters that only Triton's own launcher serves: {odd}.")
    signature = "".join("P" if kind[0] == "*" else _LETTERS[kind] for kind in parameters.values()) + _SCRATCH
    kernel = facts(compiled.kernel)
    if kernel.parameters != tuple(_BYTES[letter] for letter in signature):
        raise BackendError(
            f"{name} takes parameters of {kernel.parameters} bytes, where Triton 3.6 was expected to make {signature}."
        )
    return {
        "signature": signature,
        "parameters": list(parameters),
        "scratch_bytes": metadata.global_scratch_size,
        "dependent": getattr(metadata, "launch_pdl", False),
        "registers": kernel.registers,
        "stack_bytes": kernel.stack_bytes,
        "spills": kernel.spills,
    }


def _amd_resources(assembly: str) -> dict[str, int]:
    counts = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|[sv]gpr_spill_count):\s+(\d+)", assembly)}
    return {
        "registers": counts["vgpr_count"],
        "spills": counts["sgpr_spill_count"] + counts["vgpr_spill_count"],
    }


def stock() -> bool:
    """Does Triton compile without debugging switches?  They change the binary, and are not in the key."""
    compilation = knobs.compilation
    return not (
        knobs.runtime.debug
        or compilation.instrumentation_mode
        or compilation.override
        or compilation.always_compile
        or compilation.dump_ir
        or knobs.runtime.add_stages_inspection_hook
    )
