"""Kernels of each raw op: which there are, and which of them is a backend's implementation.

A contract lists its kernels by module name ("sm90.dense"); a module is imported when its backend is first considered,
and registers itself with `@register_kernel`.  `@register_impl("rms_norm", backend="triton")` may be called from any
package and takes the place of a backend's own kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any

from tilewright.dispatch.backends import backend_of, importable, missing
from tilewright.errors import InputError
from tilewright.generation import GENERATION

if TYPE_CHECKING:
    from tilewright.dispatch.raw import RawOp

__all__ = [
    "GENERATION",
    "Implementation",
    "implementations",
    "joint_reason",
    "list_kernels",
    "register_impl",
    "register_kernel",
    "unregister_impl",
]


@dataclass(frozen=True)
class Implementation:
    """One backend of one raw op: a kernel, or several, each with its own type of config.

    launch      (outputs, *raw_args, config=...) -> None: writes every element of `outputs`, allocated by the caller.
    configure   (bucket, dtype) -> config: pure; a tuning table's row replaces its result.  One that returns None leaves
                the bucket to the next kernel, and to the next backend: `auto` takes a candidate only by a table's row.
    candidates  (bucket, dtype) -> configs: the search space, what the tuner times besides `configure`'s result.
    configs     every config that `configure` can return, so that each can be compiled without a GPU.
    config_type builds a config from a table row's dict.
    supports    (*raw_args) -> None or the reason it cannot run, in words; may look only at what the bucket and dtypes
                tell.
    kernel      name of the kernel ("sm90.dense"); "" for what `register_impl` registered, and for several kernels.
    kernels     the kernels, where there are several.
    """

    op: str
    direction: str
    backend: str
    launch: Callable[..., None]
    configure: Callable[[Any, Any], Any] | None = None
    config_type: Callable[..., Any] | None = None
    supports: Callable[..., str | None] | None = None
    deterministic: bool = True
    batch_invariant: bool = True
    configs: tuple[Any, ...] = ()
    candidates: Callable[[Any, Any], tuple[Any, ...]] | None = None
    kernel: str = ""
    kernels: "tuple[Implementation, ...]" = ()

    def space(self, bucket: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
        """Every config worth timing, that of `configure` first if it has one; (None,) where there is nothing to
        choose.
        """
        default = self.configure(bucket, dtype) if self.configure else None
        configs = [] if default is None else [default]
        for config in self.candidates(bucket, dtype) if self.candidates else ():
            # NamedTuples of different kernels are equal where their values are
            if not any(type(config) is type(other) and config == other for other in configs):
                configs.append(config)
        return tuple(configs) or (None,)

    def kernel_of(self, config: Any) -> "Implementation":
        """The kernel that `config` configures."""
        if not self.kernels:
            return self
        return next(kernel for kernel in self.kernels if kernel.config_type is type(config))

    def only(self, kernels: "Sequence[Implementation]") -> "Implementation":
        """The same backend with these of its kernels alone, at least one, in its order of preference."""
        return self if len(kernels) == len(self.kernels or (self,)) else _merged(kernels)


_implementations: dict[tuple[str, str], dict[str, list[Implementation]]] = {}
"""Implementations by op, direction and backend; the last one registered runs, until it is removed."""
_kernels: dict[tuple[str, str], dict[str, Implementation]] = {}
"""Kernels by op and direction, then by name, in the order in which their modules were imported."""
_listed: dict[str, dict[str, list[str]]] = {}
"""Modules of each op's kernels, by backend, in the contract's order of preference."""
_importing = RLock()  # one thread at a time imports kernels; the others list them when it is done
_merging = Lock()  # nothing is imported under it: modules register from any thread's import


def listed_kernels(op: str) -> dict[str, list[str]]:
    """Modules of the kernels that the contract of `op` lists, by backend."""
    return _listed.get(op, {})


def list_kernels(op: str, modules: Sequence[str]) -> None:
    """Declare the modules of an op's kernels, preferred ones first: "tilewright.ops.gemm.kernels.sm90.dense"."""
    listed = _listed.setdefault(op, {})
    for module in modules:
        names = listed.setdefault(backend_of(_kernel_name(module)), [])
        if module not in names:
            names.append(module)


def register_kernel(
    op: "RawOp",
    *,
    configure: Callable[[Any, Any], Any] | None = None,
    config_type: Callable[..., Any] | None = None,
    configs: tuple[Any, ...] = (),
    candidates: Callable[[Any, Any], tuple[Any, ...]] | None = None,
    why_not: Callable[[Any], str | None] | None = None,
    deterministic: bool = True,
    batch_invariant: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated `launch(outs, args, config)` as a kernel of `op`; its module names the kernel.

    args is the op's NamedTuple of arguments.  why_not: (args) -> None, or the reason this kernel cannot run.
    See `Implementation` for the rest.
    """

    def register(launch: Callable[..., None]) -> Callable[..., None]:
        def launch_packed(outs: tuple[Any, ...], *values: Any, config: Any) -> None:
            launch(outs, op.pack(values), config)

        supports = None if why_not is None else lambda *values: why_not(op.pack(values))
        name = _kernel_name(launch.__module__)
        key = op.op, op.direction
        with _merging:  # a listed module is imported before the first decision of its op: no plan becomes old
            _kernels.setdefault(key, {})[name] = Implementation(
                *key, backend_of(name), launch_packed, configure, config_type, supports, deterministic,
                batch_invariant, configs, candidates, name,
            )  # fmt: skip
            _merge(*key)
        return launch

    return register


def _kernel_name(module: str) -> str:
    """ "sm90.dense" of the module "tilewright.ops.gemm.kernels.sm90.dense"."""
    _, separator, name = module.partition(".kernels.")
    if not separator or name.count(".") != 1:
        raise InputError(f"{module}: a kernel's module is <family>.kernels.<target>.<name>.")
    return name


def _merge(op: str, direction: str) -> None:
    """Put a backend's listed kernels, in the contract's order, at the bottom of its stack as one implementation."""
    stacks = _implementations.setdefault((op, direction), {})
    kernels = _kernels[op, direction]
    for backend, modules in _listed.get(op, {}).items():
        imported = [kernels[name] for name in map(_kernel_name, modules) if name in kernels]
        if not imported:
            continue
        stack = stacks.setdefault(backend, [])
        shipped = [i for i, each in enumerate(stack) if each.kernel or each.kernels]
        if shipped:
            stack[shipped[0]] = _merged(imported)
        else:
            stack.insert(0, _merged(imported))


def _merged(kernels: Sequence[Implementation]) -> Implementation:
    """One backend made of several kernels: the type of a config says whose it is."""
    if len(kernels) == 1:
        return kernels[0]
    by_config = {kernel.config_type: kernel for kernel in kernels}
    first = kernels[0]
    if len(by_config) < len(kernels) or None in by_config:
        names = ", ".join(kernel.kernel for kernel in kernels)
        raise InputError(f"{first.op}: {names} are kernels of one backend; each needs its own config_type.")

    def launch(outs: tuple[Any, ...], *args: Any, config: Any) -> None:
        by_config[type(config)].launch(outs, *args, config=config)

    def configure(bucket: Any, dtype: Any) -> Any:
        configs = (kernel.configure(bucket, dtype) for kernel in kernels if kernel.configure is not None)
        return next((config for config in configs if config is not None), None)

    def candidates(bucket: Any, dtype: Any) -> tuple[Any, ...]:
        return tuple(c for kernel in kernels if kernel.candidates for c in kernel.candidates(bucket, dtype))

    def supports(*args: Any) -> str | None:
        return joint_reason(kernels, [kernel.supports(*args) if kernel.supports else None for kernel in kernels])

    return replace(
        first, launch=launch, configure=configure, candidates=candidates, supports=supports, config_type=None,
        deterministic=any(kernel.deterministic for kernel in kernels),
        batch_invariant=any(kernel.batch_invariant for kernel in kernels),
        configs=tuple(config for kernel in kernels for config in kernel.configs), kernel="", kernels=tuple(kernels),
    )  # fmt: skip


def joint_reason(kernels: Sequence[Implementation], reasons: Sequence[str | None]) -> str | None:
    """Why none of `kernels` can run, given the reason of each; None where one has none.

    Each reason is told once, after the names of its kernels; without names where all kernels have the same.
    """
    names: dict[str, list[str]] = {}
    for kernel, reason in zip(kernels, reasons, strict=True):
        if reason is None:
            return None
        names.setdefault(reason, []).append(kernel.kernel)
    if len(names) == 1:
        return next(iter(names))
    return "; ".join(f"{', '.join(each)}: {reason}" for reason, each in names.items())


def register_impl(
    op: str,
    *,
    backend: str,
    direction: str = "fwd",
    configure: Callable[..., Any] | None = None,
    config_type: Callable[..., Any] | None = None,
    configs: tuple[Any, ...] = (),
    candidates: Callable[[tuple[int, ...], Any], tuple[Any, ...]] | None = None,
    supports: Callable[..., str | None] | None = None,
    deterministic: bool = True,
    batch_invariant: bool = True,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register the decorated `launch` as `backend` of `op` in `direction` ("fwd" or "bwd").  See `Implementation`.

    It takes the place of an implementation of that name until `unregister_impl`.
    """
    if direction not in ("fwd", "bwd"):
        raise InputError(f"register_impl({op!r}): direction {direction!r}; allowed are 'fwd' and 'bwd'.")

    def register(launch: Callable[..., None]) -> Callable[..., None]:
        GENERATION[0] += 1
        implementation = Implementation(
            op, direction, backend, launch, configure, config_type, supports, deterministic, batch_invariant, configs,
            candidates,
        )  # fmt: skip
        _implementations.setdefault((op, direction), {}).setdefault(backend, []).append(implementation)
        return launch

    return register


def unregister_impl(op: str, *, backend: str, direction: str = "fwd") -> None:
    """Take out the implementation registered last; the one whose place it took is there again.

    Raises InputError where there is none.
    """
    stacks = _implementations.get((op, direction), {})
    if backend not in stacks:
        raise InputError(
            f"unregister_impl({op!r}): no {direction} {backend!r}; registered: {', '.join(stacks) or 'none'}."
        )
    GENERATION[0] += 1
    stacks[backend].pop()
    if not stacks[backend]:
        del stacks[backend]


def implementations(op: str, direction: str, device_type: str | None = None) -> dict[str, Implementation]:
    """Every implementation of a raw op, by backend: those registered, and those in the modules its contract lists.

    With `device_type` the modules of backends that cannot run on such a device are not imported.
    """
    with _importing:
        for backend, modules in listed_kernels(op).items():
            if importable(backend) if device_type is None else missing(backend, device_type) is None:
                for module in modules:
                    import_module(module)
        return {backend: stack[-1] for backend, stack in _implementations.get((op, direction), {}).items()}
