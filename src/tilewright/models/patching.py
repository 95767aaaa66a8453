"""Replace norms, gated MLPs, rotary embeddings, residual adds and linears of one model; verified, undoable."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from tilewright.dispatch import contract
from tilewright.errors import InputError, PatchError, VerificationError
from tilewright.models import attention, decoder_layers, fp8_linears, linears, mlps, norms, rotary, rotary_tables
from tilewright.models.experts import holds_experts
from tilewright.models.report import Report, Row
from tilewright.models.specialise import Patched, patched_modules, restore, specialise
from tilewright.models.stand_in import Left, Proposal, planned_for
from tilewright.models.verification import Verification, compare
from tilewright.nn.weight_casts import WeightCasts

Mode = Literal["inference", "train"]
_OPS = (
    "rms_norm", "layer_norm", "swiglu", "geglu", "silu_and_mul", "gelu_and_mul", "apply_rope", "add_rms_norm", "matmul",
)  # fmt: skip
_KINDS = ("norm", "mlp", "rotary", "add_norm", "linear", "attention")


def patch(
    model: nn.Module,
    *,
    mode: Mode = "inference",
    verify: bool = True,
    inputs: Tensor | Mapping[str, Any] | None = None,
    ops: Iterable[str] | None = None,
    backend: str | None = None,
    fp8: bool = False,
) -> "Patch":
    """Replace what our ops can compute in `model`, in place, and prove that it still computes the same.

        with tilewright.patch(model) as p:
            print(p.report())
            model.generate(...)

    A module is replaced only after its own forward, on random input, was reproduced by ours: no list of model names is
    involved. Only instances change; no class or module of transformers is touched, its registries of attention get
    names of ours and lose none, and other models are not affected. Attention keeps its masks, windows and dropout: it
    is SDPA, or `ops.fmha` where that was measured faster or `backend` names it; mixture-of-experts weights are left.
    Linear layers run on our product for those numbers of rows at which it was measured faster on this GPU, and as
    before for all others and wherever a gradient is wanted.

    mode     "inference", or "train", which uses only ops that have a gradient and also verifies gradients
    verify   compare logits with a float32 copy of the unpatched model (float64 for a float32 model), which needs memory
    inputs   for that: token ids (B, S) or keyword arguments of the model; None draws random tokens
    ops      allow-list of kinds ("norm", "mlp", "rotary", "add_norm", "linear", "attention") or ops ("rms_norm", ...)
    backend  passed to every op as its strict choice; None lets the dispatcher choose
    fp8      also run linear layers and SwiGLU MLPs in float8, whatever `ops` says, but small layers and the head; for
             inference. All other replacements are verified without it, as strictly as ever, then the whole against
             the error that the same float8 makes in plain torch

    `copy.deepcopy`, `pickle`, `torch.compile` and `state_dict` of a patched model work; a copy stays patched when the
    original is undone. Hooks registered later on a norm that runs inside `add_rms_norm` do not fire.

    Raises PatchError if nothing can be replaced, the model is patched already or has no weights yet; VerificationError
    if accuracy is lost (the model is then as before); InputError for a wrong argument.
    """
    if mode not in get_args(Mode):
        raise InputError(f"mode={mode!r}; allowed: {', '.join(map(repr, get_args(Mode)))}.")
    allowed = _allowed(ops)
    if fp8 and mode == "train":
        raise InputError(
            'fp8=True is for mode="inference". tilewright.nn.FP8Linear is the layer that trains in float8.'
        )
    if already := next(patched_modules(model), None):
        raise PatchError(
            f"this model is already patched ({already[0] or 'the model itself'}). Call .undo() on that patch first."
        )
    if empty := next((name for name, p in model.named_parameters() if p.is_meta), None):
        raise PatchError(f"{empty} is on the meta device: load the weights before patching.")
    patched = Patch(model, mode, allowed, backend, fp8)
    if not patched.report().counts():
        raise PatchError(f"nothing in {type(model).__name__} can be replaced:\n{patched.report()}")
    patched._apply(patched._swaps)
    if verify:
        try:
            patched.verify(inputs)
        except BaseException:
            patched.undo()
            raise
    return patched


def plan_patch(model: nn.Module, device: torch.device, fp8: bool = False) -> "Patch":
    """The patch of a model that will run on `device`, which need not be here; `apply` puts it in place.

    Modules are probed where they are, and replaced by what was measured on `device`.  Raises PatchError if nothing can
    be replaced.
    """
    with planned_for(device):
        planned = Patch(model, "inference", _allowed(None), None, fp8)
    if not planned.report().counts():
        raise PatchError(f"nothing in {type(model).__name__} can be replaced:\n{planned.report()}")
    return planned


class Patch:
    """A patched model.  Made by `patch`; a context manager that undoes on exit."""

    def __init__(
        self, model: nn.Module, mode: Mode, allowed: frozenset[str], backend: str | None, fp8: bool = False
    ) -> None:
        self.model = model
        self.mode = mode
        self._swaps: dict[nn.Module, type[nn.Module]] = {}
        self._fp8: dict[nn.Module, WeightCasts] = {}
        rows = list(self._plan(allowed, backend, fp8_linears.heads(model) if fp8 else None))
        row, self._rebindings = attention.switch(model, "attention" in allowed, backend)
        self._report = Report(tuple(rows if row is None else [*rows, row]))
        self._active = False

    def apply(self) -> None:
        """Put the replacements in place, after `plan_patch`."""
        if self._active:
            raise PatchError("this patch is in place already.")
        self._apply(self._swaps)

    def report(self) -> Report:
        """Every module that was replaced, by what, or looked replaceable and was left, and why."""
        return self._report

    def verify(self, inputs: Tensor | Mapping[str, Any] | None = None) -> Verification:
        """Accuracy of the patched model beside the unpatched one's, against a wider copy of the latter.

        inputs as in `patch`. Raises VerificationError where the logits' error exceeds 1.1 times the unpatched model's
        (gradients, in mode "train": 3 times) or top-1 agreement fell beyond both 95 % intervals.  With fp8=True this is
        asked of the model without float8; with it the error may come to 1.1 times what the same float8 makes in plain
        torch, and to 0.25, and agreement is stated.
        """
        if not self._active:
            raise PatchError("this patch was undone; there is nothing to verify.")
        self._require_own_classes()
        if self._fp8 and self._swaps.keys() != self._fp8.keys():
            with self._classes_back(self._fp8):
                self._compare(inputs, "the patched model lost accuracy, without float8 already.")
        in_torch = self._in_torch() if self._fp8 else None
        return self._compare(inputs, "the patched model lost accuracy.", in_torch)

    def _compare(
        self,
        inputs: Tensor | Mapping[str, Any] | None,
        failure: str,
        in_torch: AbstractContextManager[None] | None = None,
    ) -> Verification:
        train = self.mode == "train"
        result = compare(self.model, inputs, self._suspended(), gradients=train, in_torch=in_torch)
        if not result.passed:
            raise VerificationError(f"{failure}\n{result}")
        return result

    def undo(self) -> None:
        """Give every module its class back.  Bit-identical: nothing was written into the modules."""
        if not self._active:
            raise PatchError("this patch was already undone.")
        self._require_own_classes()
        self._restore()
        for casts in self._fp8.values():
            casts.clear()

    def requantise(self) -> None:
        """Cast float8 weights again, after writes that nobody counts: through `weight.data`, or by a CUDA graph.

        Copies that a captured graph reads are cast now, in the same memory, others in the next call.
        """
        for module in self.model.modules():
            casts = vars(module).get(fp8_linears.CASTS)
            if casts is not None:
                casts.requantise()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._active:
            self.undo()

    def _plan(self, allowed: frozenset[str], backend: str | None, heads: frozenset[nn.Module] | None) -> Iterator[Row]:
        """Probe every module; remember the swaps and yield the rows of the report."""
        modules = list(self.model.named_modules())
        tables = rotary_tables.tables(self.model)
        proposals: dict[nn.Module, list[Proposal | Left]] = {
            m: list(_proposals(m, rotary_tables.nearest(path, tables), backend, heads)) for path, m in modules
        }
        within = frozenset() if heads is None else _float8_mlps(proposals, allowed, backend)
        recipes = {m: p.recipe for m, found in proposals.items() for p in found if isinstance(p, Proposal)}
        for _, module in modules:
            proposals[module] += _ask(functools.partial(decoder_layers.find, recipes=recipes, backend=backend), module)
        fused: set[nn.Module] = set()
        for path, module in modules:
            if holds_experts(module):
                yield Row(path, type(module).__name__, "experts", "left", "experts are not replaced in this version")
            if module in within:
                yield Row(path, type(module).__name__, "fp8", "replaced", "within its MLP's float8 products")
                continue
            for proposal in proposals[module]:
                reason = self._reason_to_leave(proposal, allowed)
                if reason is None and module in self._swaps:
                    reason = "something else in this module was replaced"
                text = reason or (proposal.text if isinstance(proposal, Proposal) else "")
                if module in fused and reason is None:
                    text += ", within its layer's ops.add_rms_norm"
                yield Row(path, type(module).__name__, proposal.kind, "left" if reason else "replaced", text)
                if reason is None and isinstance(proposal, Proposal):
                    self._swaps[module] = specialise(type(module), proposal.recipe)
                    if proposal.kind == "fp8":
                        self._fp8[module] = WeightCasts()
                    if isinstance(proposal.recipe, decoder_layers.AddNormRecipe):
                        fused.add(getattr(module, proposal.recipe.norm2))

    def _reason_to_leave(self, proposal: Proposal | Left, allowed: frozenset[str]) -> str | None:
        if isinstance(proposal, Left):
            return str(proposal)
        if proposal.kind == "fp8":
            return None
        if not allowed.issuperset(proposal.ops):
            return f"ops.{proposal.ops[0]} is not in ops="
        if self.mode == "train" and proposal.kind == "linear":
            return "F.linear computes whatever a gradient is wanted of"
        if self.mode == "train" and (fixed := [op for op in proposal.ops if contract(op).gradient is None]):
            return f"ops.{fixed[0]} has no gradient"
        return None

    def _apply(self, modules: Collection[nn.Module]) -> None:
        self._classes(modules)
        for rebinding in self._rebindings:
            rebinding.apply()
        self._active = True

    def _classes(self, modules: Collection[nn.Module]) -> None:
        """Give modules their generated classes, and float8 ones their weights."""
        for module in modules:
            module.__class__ = self._swaps[module]
            if module in self._fp8:
                vars(module)[fp8_linears.CASTS] = self._fp8[module]
                fp8_linears.prepare(module)

    def _require_own_classes(self) -> None:
        changed = [type(module).__name__ for module, generated in self._swaps.items() if type(module) is not generated]
        if changed:
            raise PatchError(
                f"the class of {changed[0]} was changed again after patching (FSDP? merged linears?). Undo that first."
            )

    def _restore(self) -> None:
        self._own_classes([module for module in self._swaps if isinstance(module, Patched)])
        for rebinding in self._rebindings:
            rebinding.undo()
        self._active = False

    def _own_classes(self, modules: Collection[nn.Module]) -> None:
        for module in modules:
            restore(module)
            vars(module).pop(fp8_linears.CASTS, None)

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        """The model as it was."""
        patched = [module for module in self._swaps if isinstance(module, Patched)]
        self._restore()
        try:
            yield
        finally:
            self._apply(patched)

    @contextmanager
    def _in_torch(self) -> Iterator[None]:
        """Float8 products by torch, on the same float8 numbers."""
        for module in self._fp8:
            module.__class__ = fp8_linears.in_torch(type(module))
        try:
            yield
        finally:
            for module in self._fp8:
                module.__class__ = self._swaps[module]

    @contextmanager
    def _classes_back(self, modules: Collection[nn.Module]) -> Iterator[None]:
        """These modules alone as they were."""
        self._own_classes(modules)
        try:
            yield
        finally:
            self._classes(modules)


def _allowed(names: Iterable[str] | None) -> frozenset[str]:
    """Names of ops and kinds; a kind stands for all its ops."""
    of_kind: dict[str, tuple[str, ...]] = {
        "norm": ("rms_norm", "layer_norm"),
        "mlp": ("swiglu", "geglu", "silu_and_mul", "gelu_and_mul"),
        "rotary": ("apply_rope",),
        "add_norm": ("add_rms_norm",),
        "linear": ("matmul",),
        "attention": ("attention",),
    }
    given = frozenset(of_kind) if names is None else frozenset(names)
    if unknown := given - set(_KINDS) - set(_OPS):
        raise InputError(
            f"ops has {', '.join(sorted(unknown))}; allowed: kinds {', '.join(_KINDS)}; ops {', '.join(_OPS)}."
        )
    return given.union(*(of_kind.get(name, ()) for name in given))


def _proposals(
    module: nn.Module, tables: rotary_tables.Tables, backend: str | None, heads: frozenset[nn.Module] | None
) -> Iterator[Proposal | Left]:
    """heads: layers that float8 leaves; None where nobody asked for it."""
    for find in (norms.find, mlps.find):
        yield from _ask(functools.partial(find, backend=backend), module)
    narrow: list[Proposal | Left] = []
    if heads is not None:
        narrow = _ask(functools.partial(fp8_linears.find, heads=heads, backend=backend), module)
        yield from narrow
    if not any(isinstance(found, Proposal) for found in narrow):
        yield from _ask(functools.partial(linears.find, backend=backend), module)
    yield from _ask(functools.partial(rotary.find, tables=tables, backend=backend), module)


def _float8_mlps(
    proposals: dict[nn.Module, list[Proposal | Left]], allowed: frozenset[str], backend: str | None
) -> frozenset[nn.Module]:
    """Put float8 in place of MLPs in `proposals` where their layers may run in it; gives these layers."""
    layers = {m for m, found in proposals.items() for p in found if isinstance(p, Proposal) and p.kind == "fp8"}
    within: set[nn.Module] = set()
    for module, found in proposals.items():
        mlp = next((p for p in found if isinstance(p, Proposal) and p.kind == "mlp"), None)
        if mlp is None:
            continue
        made = fp8_linears.find_mlp(module, mlp.recipe, allowed.issuperset(mlp.ops), layers, backend)
        if made is not None:
            found[found.index(mlp)] = made
            within |= {layer for layer in module.children() if layer in layers}
    return frozenset(within)


def _ask(find: Callable[[nn.Module], Proposal | None], module: nn.Module) -> list[Proposal | Left]:
    try:
        found = find(module)
    except Left as left:
        return [left]
    return [] if found is None else [found]
