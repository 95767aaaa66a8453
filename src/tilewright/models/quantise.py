"""One call that puts the linear layers of a model into fewer bits, in place: `tilewright.quantize_`.

The layers are exchanged for `nn.WeightOnlyLinear`, `nn.Int8Linear` or a frozen `nn.FP8Linear`, and the wide weights are
let go: that is what saves memory.  `patch(model, quant=...)` keeps the weights beside quantised copies, verifies, and
can be undone.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

from torch import Tensor, nn

from tilewright.errors import InputError, PatchError
from tilewright.models.fp8_linears import SMALLEST, heads
from tilewright.models.report import Report, Row
from tilewright.models.specialise import origin, patched_modules
from tilewright.models.verification import keyword_inputs
from tilewright.nn import int8_linear
from tilewright.nn.fp8_linear import FP8Linear
from tilewright.nn.rotation import unrotatable
from tilewright.nn.smoothing import observed_amax, smoothing_factors
from tilewright.nn.weight_only_linear import WeightOnlyLinear, unfit

Format = Literal[
    "int8", "int4", "fp8", "w8a8_int8", "mxfp8", "mxfp4", "nvfp4",
    "int8_rotated", "int4_rotated", "w8a8_int8_rotated", "mxfp4_rotated", "nvfp4_rotated", "w8a8_int8_smooth",
]  # fmt: skip
FORMATS: tuple[str, ...] = get_args(Format)
ROTATED, SMOOTH = "_rotated", "_smooth"
"""Ends of formats: input and weight are rotated first; channels' ranges move into the weight by calibration."""
LAYERS: dict[str, type[nn.Module]] = {
    "fp8": FP8Linear,
    **{format: int8_linear.Int8Linear for format in FORMATS if format.startswith("w8a8_int8")},
}
"""Layers with activations of 8 bits; other formats are those of `nn.WeightOnlyLinear`."""
MOST = {"int8": 0.25, "w8a8_int8": 0.25, "mxfp8": 0.25, "int4": 0.5, "mxfp4": 0.5, "nvfp4": 0.5}
"""Largest relative error of logits that `patch(quant=)` accepts, by plain format.  Numbers of 4 bits make 8 to 12 % of
error a product of random numbers.
"""
_UNIT = 16  # features: of float8 products


def plain(format: str) -> str:
    """The format of the numbers, without what is done before."""
    return format.removesuffix(ROTATED).removesuffix(SMOOTH)


def check_format(caller: str, format: str, calibrated: bool) -> None:
    """Raise InputError for an unknown format, and for one that is calibrated where there is nothing to calibrate on."""
    if format not in FORMATS:
        raise InputError(f"{caller} is {format!r}; allowed are {', '.join(map(repr, FORMATS))}.")
    if format.endswith(SMOOTH) and not calibrated:
        raise InputError(f"{caller} is {format!r}, which is calibrated. Give inputs=, token ids or keyword arguments.")


def quantize_(
    model: nn.Module,
    format: str = "int4",
    *,
    filter: Callable[[str, nn.Linear], bool] | None = None,
    skip: tuple[str, ...] = (),
    smallest: int = SMALLEST,
    inputs: Tensor | Mapping[str, Any] | None = None,
    backend: str | None = None,
) -> Report:
    """Exchange the linear layers of `model` for layers with weights in `format`, in place; says which, and why not.

        print(tilewright.quantize_(model, "int4"))

    format    "int4", "int8": integers with a scale for 128 of a row, activations stay in 16 bits; "mxfp4", "nvfp4",
              "mxfp8": numbers with a scale for 32 or 16; "fp8": e4m3 for weights and activations, as `nn.FP8Linear`;
              "w8a8_int8": int8 for both, with a scale for each row, as `nn.Int8Linear`.  With "_rotated" at the end,
              "int4_rotated", inputs and weights are rotated first by `ops.hadamard_transform` (QuaRot);
              "w8a8_int8_smooth" divides channels by what calibration on `inputs` gives (SmoothQuant)
    filter    (path, layer) -> whether to take this layer
    skip      paths, or their last parts ("gate", "model.layers.0.mlp.down_proj"), that stay
    smallest  layers with fewer inputs or outputs stay
    inputs    what "w8a8_int8_smooth" is calibrated on: token ids (B, S) or keyword arguments of the model
    backend   passed to every product as its strict choice

    The head, layers that share a weight with an embedding or another module, layers with hooks, subclasses of nn.Linear
    and sizes that the format does not divide stay as they are; the report has a row for each.  For inference: the wide
    weights are gone, and `state_dict` holds the quantised ones.  The report is for the caller to judge: no accuracy is
    measured here.  `patch(model, quant=format)` verifies and can be undone.

    Raises InputError for an unknown format, PatchError for a patched model, weights on the meta device, or where no
    layer can be exchanged.
    """
    check_format("quantize_: format", format, inputs is not None)
    if already := next(patched_modules(model), None):
        raise PatchError(f"this model is patched ({already[0] or 'the model itself'}). Undo the patch first.")
    exchange = Exchange(model, format, filter=filter, skip=skip, smallest=smallest, backend=backend)
    exchange.calibrate(lambda: model(**keyword_inputs(model, inputs)))
    exchange.apply(release=True)
    return exchange.report


class Exchange:
    """The layers of a model that `quantize_` exchanges, planned; `apply` and `undo` put them in place and out of it.

    Raises PatchError where there are none, or weights are on the meta device.
    """

    def __init__(
        self,
        model: nn.Module,
        format: str,
        *,
        filter: Callable[[str, nn.Linear], bool] | None = None,
        skip: tuple[str, ...] = (),
        smallest: int = SMALLEST,
        backend: str | None = None,
    ) -> None:
        if empty := next((name for name, p in model.named_parameters() if p.is_meta), None):
            raise PatchError(f"{empty} is on the meta device: load the weights before quantising.")
        self._model, self._format, self._backend = model, format, backend
        self.linears: dict[str, nn.Linear] = {}
        self._layers: dict[str, nn.Module] = {}
        kept_heads = heads(model)
        owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
        rows: list[Row] = []
        for path, module in model.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            reason = _why_not(path, module, format, smallest, skip, filter, module in kept_heads, owners)
            text = reason or f"nn.{LAYERS.get(format, WeightOnlyLinear).__name__} of {format}"
            name = origin(type(module))[0].__name__
            rows.append(Row(path, name, "quant", "left" if reason else "replaced", text))
            if not reason:
                self.linears[path] = module
        self.report = Report(tuple(rows))
        if not self.linears:
            raise PatchError(f"nothing in {type(model).__name__} can be quantised to {format}:\n{self.report}")

    def calibrate(self, run: Callable[[], object]) -> None:
        """Make the layers of a format with divisors, from what their inputs are while `run()` calls the wide model."""
        if not self._format.endswith(SMOOTH):
            return
        for path, amax in observed_amax(self.linears, run).items():
            linear = self.linears[path]
            factors = smoothing_factors(amax, linear.weight.detach().abs().amax(0))
            self._layers[path] = converted(linear, self._format, self._backend, factors)

    def apply(self, *, release: bool = False) -> None:
        """Put the layers in place; those of an earlier call again.   release: let each wide layer go at once."""
        for path, linear in list(self.linears.items()):
            layer = self._layers.get(path)
            if layer is None:
                layer = converted(linear, self._format, self._backend)
            if release:
                del self.linears[path]
            else:
                self._layers[path] = layer
            _put(self._model, path, layer)
            layer.train(linear.training)

    def undo(self, *, forget: bool = False) -> None:
        """Put the wide layers back: the same objects.   forget: let the quantised ones go."""
        for path, linear in self.linears.items():
            _put(self._model, path, linear)
        if forget:
            self._layers.clear()

    @contextmanager
    def in_torch(self) -> Iterator[None]:
        """Compute the quantised products by torch inside the block."""
        layers: list[Any] = list(self._layers.values())
        for layer in layers:
            layer.backend = "torch"
        try:
            yield
        finally:
            for layer in layers:
                layer.backend = self._backend


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


def converted(linear: nn.Linear, format: str, backend: str | None = None, smooth: Tensor | None = None) -> nn.Module:
    """The layer that takes the place of `linear`.   smooth: divisors of its input's channels."""
    if format.endswith(SMOOTH) and smooth is None:
        raise PatchError(f"{format} is calibrated. Call `calibrate` before the layers are put in place.")
    rotate = format.endswith(ROTATED)
    if format == "fp8":
        return FP8Linear.from_linear(linear, frozen=True, backend=backend)
    if plain(format) == "w8a8_int8":
        return int8_linear.Int8Linear.from_linear(linear, smooth=smooth, rotate=rotate, backend=backend)
    return WeightOnlyLinear.from_linear(linear, plain(format), rotate=rotate, backend=backend)


def _why_not(
    path: str,
    module: nn.Linear,
    format: str,
    smallest: int,
    skip: tuple[str, ...],
    filter: Callable[[str, nn.Linear], bool] | None,
    is_head: bool,
    owners: Counter[int],
) -> str | None:
    """Why a layer stays; None if it is exchanged."""
    if path in skip or path.rpartition(".")[2] in skip:
        return "named in skip="
    if is_head:
        return "the head of a model, or tied to an embedding, stays as it is"
    if not path:
        return "the model itself is this layer; nn.WeightOnlyLinear.from_linear converts one"
    if origin(type(module))[0] is not nn.Linear:
        return f"a {type(module).__name__}, not a plain nn.Linear"
    if any(owners[id(p)] > 1 for p in module.parameters(recurse=False)):
        return "its weight is shared with another module"
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        return "it has hooks or a parametrization"
    if not module.weight.is_floating_point() or module.weight.dtype.itemsize == 1:
        return f"its weight is {module.weight.dtype}"
    if min(module.weight.shape) < smallest:
        return f"{module.in_features} inputs and {module.out_features} outputs; below {smallest} a layer stays"
    if format == "fp8" and (module.in_features % _UNIT or module.out_features % _UNIT):
        return f"{module.in_features} inputs and {module.out_features} outputs are not multiples of {_UNIT}"
    if plain(format) == "w8a8_int8" and (reason := int8_linear.unfit(module.in_features)):
        return reason
    if format not in LAYERS and (reason := unfit(plain(format), module.in_features)):
        return reason
    if format.endswith(ROTATED) and (reason := unrotatable(module.in_features)):
        return reason
    if filter is not None and not filter(path, module):
        return "the filter leaves it"
    return None
