"""A mask of `tilewright.mask` inside a tensor: transformers hands masks from a model to its layers as 4-D tensors.

The tensor has the shape of the dense mask and no elements.  Our attention reads the closed form from it.  For any other
operation the elements are computed, exact and shared, so that models which slice or overwrite their masks stay right.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from tilewright import mask as masks
from tilewright.errors import InputError
from tilewright.hardware.device_cache import DeviceCache
from tilewright.log import log_once
from tilewright.mask import Mask
from tilewright.models.attention.step import elements, is_step


class VisibleKeys(NamedTuple):
    """A mask (None: everything), and the number of keys that it covers, from the first one.

    `keys` may exceed S_k: the extra keys only shift positions, and the mask allows none of them.
    """

    mask: Mask | None
    keys: int


class CarriedMask(Tensor):
    """bool (B, 1, S_q, S_k), True where a key is visible; `visible` is the same in closed form."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _visible: VisibleKeys
    _elements: DeviceCache[tuple[Tensor]]
    _shared: bool

    @staticmethod
    def __new__(cls, visible: VisibleKeys, shape: tuple[int, int, int], device: torch.device) -> "CarriedMask":
        """shape: (B, S_q, S_k)."""
        batch, s_q, s_k = shape
        tensor: CarriedMask = Tensor._make_wrapper_subclass(cls, (batch, 1, s_q, s_k), dtype=torch.bool, device=device)
        tensor._visible, tensor._elements, tensor._shared = visible, DeviceCache("elements of masks"), False
        return tensor

    def __init__(self, visible: VisibleKeys, shape: tuple[int, int, int], device: torch.device) -> None:
        """Do nothing: `__new__` sets all attributes."""

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CarriedMask({self._visible.mask!r}, {tuple(self.shape)})"

    @property
    def visible(self) -> VisibleKeys | None:
        """The closed form; None after a write into the elements, or once a view shares their memory."""
        return None if self._shared else self._visible

    @property
    def elements(self) -> Tensor:
        """The dense mask, computed on first use."""
        return self._elements.get("dense", self.device, self._dense, needs=self._visible)[0]

    def _dense(self) -> tuple[Tensor]:
        batch, _, s_q, s_k = self.shape
        allowed, keys = self._visible
        if allowed is None:
            return (torch.ones(self.shape, dtype=torch.bool, device=self.device),)
        dense = allowed.dense(batch, 1, s_q, keys, self.device)
        return (F.pad(dense, (0, s_k - keys)) if keys < s_k else dense[..., :s_k].contiguous(),)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run any operation on the elements; only `detach`, which autograd calls, keeps the closed form."""
        if func is torch.ops.aten.detach.default:
            return args[0]

        schema = func._schema
        shares = schema.is_mutable or any(result.alias_info is not None for result in schema.returns)

        def plain(x: Any) -> Any:
            if not isinstance(x, CarriedMask):
                return x
            x._shared |= shares
            return x.elements

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


def visible_keys(attention_mask: Tensor, s_q: int, s_k: int) -> VisibleKeys:
    """Read a 4-D mask: (B or 1, H or 1, S_q or 1, S_k) bool, or floats: 0, and -inf or the least number.

    Raises InputError for other shapes, and for other numbers, which are a bias and no mask.
    """
    if is_step(attention_mask):
        attention_mask = elements(attention_mask)
    if isinstance(attention_mask, CarriedMask):
        if tuple(attention_mask.shape[2:]) == (s_q, s_k) and attention_mask.visible is not None:
            return attention_mask.visible
        attention_mask = attention_mask.elements
    if attention_mask.dim() != 4 or attention_mask.shape[2] not in (1, s_q) or attention_mask.shape[3] != s_k:
        raise InputError(
            f"attention: the mask is {tuple(attention_mask.shape)}; needs (B, 1, {s_q}, {s_k}), a query a row and a "
            "key a column."
        )
    return _of_elements(_allowed(attention_mask), s_q, s_k)


def _allowed(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise InputError(f"attention: the mask is {mask.dtype}; needs bool, or 0 and -inf to be added to the scores.")
    if torch.compiler.is_compiling():
        raise InputError(
            f"attention: a mask of {mask.dtype} under torch.compile, where its numbers cannot be looked at. Pass bool."
        )
    allowed = mask == 0
    if not bool((allowed | (mask <= torch.finfo(mask.dtype).min)).all()):
        raise InputError(
            "attention: the mask holds other numbers than 0 and -inf. A bias of the scores is a score_mod of ops.fmha; "
            'here use set_attn_implementation("sdpa") or "eager".'
        )
    return allowed


def _of_elements(allowed: Tensor, s_q: int, s_k: int) -> VisibleKeys:
    """allowed: bool (B or 1, H or 1, S_q or 1, S_k)."""
    if s_q == 0 or s_k == 0:
        return VisibleKeys(None, s_k)
    keys = max(s_q, s_k)  # a table has a row for every position, and positions of queries begin at 0
    allowed = F.pad(allowed, (0, keys - s_k)) if keys > s_k else allowed
    if allowed.shape[2] == 1 or allowed.stride(2) == 0:
        return VisibleKeys(by_keys(allowed[:, :, :1]), keys)
    if not torch.compiler.is_compiling():  # Dynamo does not trace loggers
        log_once(
            "attention-elements",
            "attention: a mask given by its elements becomes a table of S_k x S_k bits; "
            "masks of transformers' own functions need none",
        )
    return VisibleKeys(masks.block(F.pad(allowed, (0, 0, keys - s_q, 0)), 1), keys)


def by_keys(allowed: Tensor) -> Mask:
    """The same keys for all queries.   allowed: bool (B or 1, H or 1, 1, S_k)"""
    return masks.block(allowed, (allowed.shape[3], 1))
