"""Configurations as tables write them: an implementation's config to a JSON object, and back, doubts refused."""

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tilewright.dispatch.registry import Implementation
from tilewright.errors import TableError


def to_row(config: Any, kernel: str = "") -> dict[str, Any] | None:
    """`config`, a NamedTuple, a dataclass or a mapping, as the fields of a table row; None stays None.

    kernel: name of the kernel that it configures, as the plan has it; the first field of the row, where there is one.
    """
    if config is None:
        return None
    if is_dataclass(config) and not isinstance(config, type):
        fields: Mapping[str, Any] = asdict(config)
    else:
        fields = config._asdict() if hasattr(config, "_asdict") else config
    return {"kernel": kernel, **fields} if kernel else dict(fields)


def from_row(implementation: Implementation, values: Mapping[str, Any], bucket: tuple[int, ...], dtype: Any) -> Any:
    """The config that a row's `values` describe; `values["kernel"]` says of which of the backend's kernels.

    Raises TableError, saying why, for unknown or missing fields, values of another type, and, where the implementation
    declares a search space, a config that is not in it: nothing has compiled or checked such a one.
    """
    what = f"{implementation.backend} config {dict(values)}"
    kernels = {kernel.kernel: kernel for kernel in implementation.kernels or (implementation,)}
    if implementation.kernels or (implementation.kernel and "kernel" in values):
        name = values.get("kernel")
        if name not in kernels:
            raise TableError(f"{what}: kernel is {name!r}; it has to be one of {', '.join(kernels)}.")
        implementation, values = kernels[name], {field: value for field, value in values.items() if field != "kernel"}
    build = implementation.config_type
    if build is None:
        raise TableError(f"{what}: this backend takes no configuration.")
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    hints = get_type_hints(build) if isinstance(build, type) else {}
    for name, value in fields.items():
        if name in hints and not _fits(value, hints[name]):
            allowed = getattr(hints[name], "__name__", hints[name])
            raise TableError(f"{what}: {name} is {value!r}, a {type(value).__name__}; it has to be {allowed}.")
    try:
        config = build(**fields)
    except (TypeError, ValueError) as error:
        raise TableError(f"{what} does not fit: {error}.") from None
    if implementation.candidates is not None:
        space = (*implementation.space(bucket, dtype), *implementation.configs)
        if config not in space:
            raise TableError(f"{what} is outside the search space, {len(space)} configurations for {bucket}.")
    return config


def _fits(value: Any, hint: Any) -> bool:
    """Is `value` of the annotated type?  Annotations beyond plain classes and unions of them are not judged."""
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(hint))
    kind = get_origin(hint) or hint
    if not isinstance(kind, type):
        return True
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind if kind in (int, bool, str) else isinstance(value, kind)
