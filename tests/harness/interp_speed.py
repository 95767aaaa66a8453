"""Triton's CPU interpreter, several times as fast and with the same results; of Triton 3.6, as `interp_fixes`.

A kernel's time there goes into bookkeeping, not into numpy.  `install()` takes away

  - the overflow checks of integers: computed in int64 for every sum and product, and looked at in debug mode alone
  - patching the language for every launch and every call of a device function: once is enough where nothing compiles
  - reductions that call the combining function once for every element: once for every level of a tree, as on a GPU
  - what types and shapes of the same tile are made of, every time anew
"""

import dataclasses
from functools import cache

import numpy as np
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def bound(member):
    """A builtin of the language that runs in the interpreter, from any caller."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def call(*args, _semantic=None, **kwargs):
        return function(*args, _semantic=semantic, **kwargs)

    return call


def patch_language():
    """What `interpreter._patch_lang` does for a kernel that sees all of the language, and leaves it so."""
    scope = interpreter._LangPatchScope()
    for owner in (tl, core, tl.math, tl.tensor, core.tensor_descriptor_base):
        for name in dir(owner):
            member = getattr(owner, name)
            if core.is_builtin(member):
                setattr(owner, name, bound(member))
    interpreter._patch_lang_tensor(tl.tensor, scope)
    for language in (tl, core):
        interpreter._patch_lang_core(language, scope)
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()


def generic_reduce(self, inputs):
    """Neighbours are combined, then neighbours of those: any associative function may be asked so."""
    rank, axis = inputs[0].handle.data.ndim, self.axis or 0
    parts = [x.handle.data.ravel() if self.axis is None else np.moveaxis(x.handle.data, axis, 0) for x in inputs]
    while len(parts[0]) > 1:
        pairs = [self.to_tensor(part[i::2], x.dtype) for i in (0, 1) for part, x in zip(parts, inputs, strict=True)]
        combined = self.combine_fn.fn(*pairs)
        parts = [x.handle.data for x in (combined if isinstance(combined, tuple) else (combined,))]
    if not self.keep_dims:
        results = [part[0] for part in parts]
    elif self.axis is None:
        results = [part.reshape([1] * rank) for part in parts]
    else:
        results = [np.moveaxis(part, 0, axis) for part in parts]
    return [self.to_tensor(result, x.dtype) for result, x in zip(results, inputs, strict=True)]


@cache
def shapes(sizes):
    """Of a tile: its shape as its type has it, as a tensor has it, and how many numbers that is, as both have it."""
    numel = core.validate_block_shape(sizes)
    return core.tuple(sizes), core.tuple([core.constexpr(size) for size in sizes]), numel, core.constexpr(numel)


SCALAR = core.tuple(()), core.constexpr(1)


def block_type_init(self, element_ty, shape):
    sizes = tuple(size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape)
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.element_ty = element_ty
    self.shape, self.of_tensors, self.numel, self.numel_of_tensors = shapes(sizes)


def tensor_init(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = (type.of_tensors, type.numel_of_tensors) if type.is_block() else SCALAR


def tuple_type_init(self, types, fields=None):
    self.types, self.fields = types, fields or [""] * len(types)


def dtype_eq(stock):
    return lambda self, other: self is other or stock(self, other)


def broadcast(stock):
    def broadcast_impl_value(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and left.shape is right.shape:
            return lhs, rhs
        return stock(self, lhs, rhs)

    return broadcast_impl_value


INTEGERS = frozenset(id(t) for t in (tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64))
HALVES = frozenset(id(t) for t in (tl.float16, tl.bfloat16))
WITH_NUMBERS = {id(tl.int32): (int,), id(tl.int64): (int,), id(tl.float32): (int, float)}


def takes(dtype, number):
    """Whether a number beside a tensor of `dtype` becomes one of `dtype`."""
    kind = type(number)
    return kind in WITH_NUMBERS.get(id(dtype), ()) and (kind is float or -(1 << 31) <= number < 1 << 31)


def operands(stock):
    """The types of most operands agree as they are: two tensors of one type, a pointer and integers, a small number."""

    def binary_op_type_checking_impl(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        left, right = (x.dtype if type(x) is tl.tensor else None for x in (lhs, rhs))
        if left is None and right is not None and arithmetic_check and takes(right, lhs):
            lhs, left = self.scalar_constant(lhs, right), right
        elif right is None and left is not None and arithmetic_check and takes(left, rhs):
            rhs, right = self.scalar_constant(rhs, left), left
        one_type = left is right and type(left) is tl.dtype and not (div_or_mod and id(left) in HALVES)
        if one_type or (allow_lhs_ptr and id(right) in INTEGERS and left is not None and left.is_ptr()):
            return self.broadcast_impl_value(lhs, rhs)
        return stock(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


def by_name(stock):
    found = {}

    def numpy_type(ty):
        name = ty.scalar.name
        if name not in found:
            found[name] = stock(ty)
        return found[name]

    return numpy_type


def patch_types():
    """Names are made when they are asked for, shapes of tiles once."""
    tl.block_type.__init__, tl.tensor.__init__ = block_type_init, tensor_init
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tuple_type.__init__ = tuple_type_init
    core.tuple_type.name = property(lambda self: str(list(zip(self.fields, self.types, strict=True))))
    tl.dtype.__eq__ = dtype_eq(tl.dtype.__eq__)
    TritonSemantic.broadcast_impl_value = broadcast(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_type_checking_impl = operands(TritonSemantic.binary_op_type_checking_impl)
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)


def install():
    """After `interp_fixes`, once in a process."""
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter.ReduceOps.generic_reduce = generic_reduce
    patch_types()
    patch_language()
