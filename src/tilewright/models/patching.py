"""Replace norms, gated MLPs, rotary embeddings, residual adds, linears and losses of one model; verified, undoable."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Self, get_args

import torch
from torch import Tensor, nn

from tilewright.errors import InputError, PatchError, VerificationError
from tilewright.models import attention, fp8_linears, planning, quantise
from tilewright.models.agreement import MOST
from tilewright.models.planning import Mode
from tilewright.models.report import OPS_OF_KIND, Report
from tilewright.models.specialise import Patched, patched_modules, restore, specialise
from tilewright.models.stand_in import planned_for
from tilewright.models.training.comparison import judgement
from tilewright.models.verification import Verification, compare, keyword_inputs
from tilewright.nn.weight_casts import WeightCasts


def patch(
    model: nn.Module,
    *,
    mode: Mode = "inference",
    verify: bool = True,
    inputs: Tensor | Mapping[str, Any] | None = None,
    ops: Iterable[str] | None = None,
    backend: str | None = None,
    fp8: bool = False,
    quant: str | None = None,
) -> "Patch":
    """Replace what our ops can compute in `model`, in place, and prove that it still computes the same.

        with tilewright.patch(model) as p:
            print(p.report())
            model.generate(...)

    A module is replaced only after its own forward, on random input, was reproduced by ours: no list of model names is
    involved. Only instances change; no class or module of transformers is touched, its registries of attention get
    names of ours and lose none, and other models are not affected. Attention keeps its masks, windows and dropout: it
    is SDPA, or `ops.fmha` where that was measured faster or `backend` names it.  Experts in the form of transformers'
    interface run by `ops.fused_moe` or `ops.fused_moe_bias` on a GPU, and on a CPU as before; so do their routers, by
    `ops.topk_softmax` or `ops.topk_sigmoid`.
    Linear layers run on our product for those numbers of rows at which it was measured faster on this GPU, and as
    before for all others and wherever a gradient is needed.

    mode     "inference", or "train", which uses only ops that have a gradient, verifies gradients, and computes a
             language model's loss without logits: given labels in training, they are None unless skip_logits=False
    verify   compare logits with a float32 copy of the unpatched model (float64 for a float32 model), which needs memory
    inputs   what `verify` runs on: token ids (B, S) or keyword arguments of the model; None draws random tokens
    ops      allow-list of kinds ("norm", "mlp", "rotary", "add_norm", "linear", "attention", "experts", "routers",
             "loss") or of ops ("rms_norm", ...)
    backend  passed to every op as its strict choice; None lets the dispatcher choose
    fp8      also run linear layers and SwiGLU MLPs in float8, except small layers and the head, whatever `ops` is; for
             inference. All other replacements are verified without it, as strictly as ever, then the whole against
             the error that the same float8 makes in plain torch
    quant    a format of `quantize_` ("int4", "int4_rotated", "nvfp4", "w8a8_int8_smooth", ...): also put linear layers
             into it, beside their weights, which undo puts back; "fp8" is fp8=True.  Verified like float8

    `copy.deepcopy`, `pickle`, `torch.compile` and `state_dict` of a patched model work; a copy stays patched when the
    original is undone. Hooks registered later on a norm that runs inside `add_rms_norm` or
    `qk_norm_rope` do not fire.

    Raises PatchError if nothing can be replaced, the model is patched already or has no weights yet; VerificationError
    if accuracy is lost (the model is then as before); InputError for a wrong argument.
    """
    if mode not in get_args(Mode):
        raise InputError(f"mode={mode!r}; allowed: {', '.join(map(repr, get_args(Mode)))}.")
    allowed = _allowed(ops)
    if quant is not None:
        quantise.check_format("quant", quant, inputs is not None)
        if mode == "train" or fp8:
            raise InputError('quant= is for mode="inference", and in place of fp8=True.')
        fp8, quant = quant == "fp8", None if quant == "fp8" else quant
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
    patched = Patch(model, mode, allowed, backend, fp8, quant)
    if patched._exchange is not None:
        patched._exchange.calibrate(lambda: model(**keyword_inputs(model, inputs)))
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


def plan_patch(model: nn.Module, device: torch.device, fp8: bool = False, ops: Iterable[str] | None = None) -> "Patch":
    """Plan the patch of a model that will run on `device`, which this machine need not have; `apply` puts it in place.

    Modules are probed on the device that holds them; the choices use measurements of `device`.  ops as in `patch`; with
    ["linear"] the model may be patched: what that patch left is considered again.  Raises PatchError if nothing can be
    replaced.
    """
    with planned_for(device):
        result = Patch(model, "inference", _allowed(ops), None, fp8)
    if not result.report().counts():
        raise PatchError(f"nothing in {type(model).__name__} can be replaced:\n{result.report()}")
    return result


class Patch:
    """A patched model.  Made by `patch`; a context manager that undoes on exit."""

    def __init__(
        self,
        model: nn.Module,
        mode: Mode,
        allowed: frozenset[str],
        backend: str | None,
        fp8: bool = False,
        quant: str | None = None,
    ) -> None:
        self.model = model
        self.mode = mode
        plan = planning.plan(model, mode, allowed, backend, fp8)
        self._swaps = {module: specialise(type(module), chosen.recipe) for module, chosen in plan.chosen.items()}
        self._fp8 = {module: WeightCasts() for module, chosen in plan.chosen.items() if chosen.kind == "fp8"}
        row, self._rebindings = attention.switch(model, "attention" in allowed, backend, training=mode == "train")
        rows = plan.rows if row is None else [*plan.rows, row]
        self._exchange = None if quant is None else quantise.Exchange(model, quant, backend=backend)
        if self._exchange is not None:
            self._most = quantise.MOST[quantise.plain(quant or "")]
            for linear in self._exchange.linears.values():
                self._swaps.pop(linear, None)
            rows = [row for row in rows if row.kind != "linear" or row.path not in self._exchange.linears]
            rows += self._exchange.report.rows
        self._report = Report(tuple(rows))
        self._active = False

    def apply(self) -> None:
        """Put the replacements in place, after `plan_patch`."""
        if self._active:
            raise PatchError("this patch is in place already.")
        self._apply(self._swaps)

    def report(self) -> Report:
        """Every module that was replaced, and by what; every one that looked replaceable and was left, and why."""
        return self._report

    def verify(self, inputs: Tensor | Mapping[str, Any] | None = None) -> Verification:
        """Compare the patched and the unpatched model, each with a wider copy of the unpatched one.

        inputs as in `patch`. Raises VerificationError where the logits' error exceeds 1.1 times the unpatched model's
        or top-1 agreement fell beyond both 95 % intervals; in mode "train" also where all gradients are off 3 times as
        far, or the loss or its gradient of a parameter 2 times.  With fp8=True that rule judges the model without
        float8.  With float8 the error may be 1.1 times the sum of the unpatched model's and of the same float8 in plain
        torch, at most 0.25; agreement is reported and not judged.
        """
        if not self._active:
            raise PatchError("this patch was undone; there is nothing to verify.")
        self._require_own_classes()
        if self._fp8 and self._swaps.keys() != self._fp8.keys():
            with self._classes_back(self._fp8):
                self._compare(inputs, "the patched model lost accuracy, without float8 already.")
        if self._exchange is not None:
            if self._swaps or self._rebindings:
                self._exchange.undo()
                try:
                    self._compare(inputs, "the patched model lost accuracy, without quantised layers already.")
                finally:
                    self._exchange.apply()
            return self._compare(inputs, "the quantised model lost accuracy.", self._exchange.in_torch(), self._most)
        in_torch = self._in_torch() if self._fp8 else None
        return self._compare(inputs, "the patched model lost accuracy.", in_torch)

    def _compare(
        self,
        inputs: Tensor | Mapping[str, Any] | None,
        failure: str,
        in_torch: AbstractContextManager[None] | None = None,
        most: float = MOST,
    ) -> Verification:
        train = self.mode == "train"
        without = self._suspended(quantised=in_torch is not None)
        losses = judgement(self.model, self._report) if train else None
        result = compare(self.model, inputs, without, gradients=train, in_torch=in_torch, most=most, losses=losses)
        if not result.passed:
            raise VerificationError(f"{failure}\n{result}")
        return result

    def undo(self) -> None:
        """Give every module its class back.  Bit-identical: nothing was written into the modules."""
        if not self._active:
            raise PatchError("this patch was already undone.")
        self._require_own_classes()
        self._restore()
        if self._exchange is not None:
            self._exchange.undo(forget=True)
        for casts in self._fp8.values():
            casts.clear()

    def requantise(self) -> None:
        """Cast float8 weights again, after writes that torch does not count: through `weight.data`, or by a CUDA graph.

        Copies that a captured graph reads are cast now, in the same memory; others in the next call.
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

    def _apply(self, modules: Collection[nn.Module]) -> None:
        self._classes(modules)
        for rebinding in self._rebindings:
            rebinding.apply()
        if self._exchange is not None:
            self._exchange.apply()
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
    def _suspended(self, *, quantised: bool = True) -> Iterator[None]:
        """Undo the patch inside the block.   quantised: linear layers are in fewer bits outside of it."""
        patched = [module for module in self._swaps if isinstance(module, Patched)]
        self._restore()
        if self._exchange is not None:
            self._exchange.undo()
        try:
            yield
        finally:
            self._apply(patched)
            if self._exchange is not None and not quantised:
                self._exchange.undo()

    @contextmanager
    def _in_torch(self) -> Iterator[None]:
        """Compute float8 products by torch inside the block, on the same float8 numbers."""
        for module in self._fp8:
            module.__class__ = fp8_linears.in_torch(type(module))
        try:
            yield
        finally:
            for module in self._fp8:
                module.__class__ = self._swaps[module]

    @contextmanager
    def _classes_back(self, modules: Collection[nn.Module]) -> Iterator[None]:
        """Undo the patch of these modules alone inside the block."""
        self._own_classes(modules)
        try:
            yield
        finally:
            self._classes(modules)


def _allowed(names: Iterable[str] | None) -> frozenset[str]:
    """The names in `ops=`, None being all kinds, with the ops of every kind among them."""
    names = frozenset(OPS_OF_KIND) if names is None else frozenset(names)
    known_ops = [op for ops in OPS_OF_KIND.values() for op in ops]
    if unknown := names - set(OPS_OF_KIND) - set(known_ops):
        kinds = ", ".join(OPS_OF_KIND)
        raise InputError(f"ops has {', '.join(sorted(unknown))}; allowed: kinds {kinds}; ops {', '.join(known_ops)}.")
    return names.union(*(ops for kind, ops in OPS_OF_KIND.items() if kind in names))
