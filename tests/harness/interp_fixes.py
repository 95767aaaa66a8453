"""Make Triton's CPU interpreter compute what a GPU computes; written for Triton 3.6, whose private names it replaces.

`install()` is called once, before the first kernel runs under TRITON_INTERPRET=1.  It repairs:

  - bfloat16 and fp8 arithmetic, comparison, fma and `tl.dot`, which would silently work on the raw bit patterns
  - casts to bfloat16 and fp8, which would truncate; they round to nearest even, bit for bit as torch's
  - the fnuz fp8 types, `tl.dot_scaled` and libdevice functions, which do not exist there
  - loops with a run-time bound, which fail on numpy 2.4 and newer
  - `@triton.autotune`, which asks for a GPU driver; the first configuration wins

A reduction or scan directly on bfloat16 or fp8 raises instead of being wrong: kernels convert to float32 first.
What the interpreter cannot show: races, layouts, alignment rules, fast-math; programs run one after another.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language import semantic
from triton.language.extra import libdevice
from triton.runtime import interpreter

TORCH_TYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
# numpy has no such types: the interpreter stores them as unsigned integers of the same width
BIT_PATTERNS = ("bf16", "fp8e4nv", "fp8e5", "fp8e4b8", "fp8e5b16")

Builder = interpreter.InterpreterBuilder
Handle = interpreter.TensorHandle
_stock = {name: getattr(Builder, name) for name in ("binary_op", "unary_op", "cast_impl", "create_fma", "create_dot")}


def is_bits(ty):
    """Whether numpy holds values of Triton type `ty` as bit patterns."""
    return ty.scalar.name in BIT_PATTERNS


def convert(data, source, target):
    """numpy storage of Triton type `source` -> numpy storage of Triton type `target`, through torch's own casts."""
    s, t = TORCH_TYPES[source.scalar.name], TORCH_TYPES[target.scalar.name]
    raw = np.ascontiguousarray(data)
    if s is torch.bfloat16:
        values = torch.from_numpy(raw.view(np.int16)).view(s)
    elif s.itemsize == 1:
        values = torch.from_numpy(raw.view(np.uint8)).view(s).to(torch.float32)
    else:
        values = torch.from_numpy(raw)
    values = values.to(t)
    if t is torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    if t.itemsize == 1:
        return values.view(torch.uint8).numpy()
    return values.numpy()


def value(handle):
    """The numbers a handle stands for."""
    return convert(handle.data, handle.dtype, tl.float32) if is_bits(handle.dtype) else handle.data


def pack(numbers, ty):
    """Numbers, rounded once, as a handle of bit-pattern type `ty`."""
    return Handle(convert(numbers.astype(np.float32), tl.float32, ty.scalar), ty.scalar)


# ------------------------------------------------------------------------------------------------ arithmetic and casts
def binary_op(self, lhs, rhs, op):
    if not is_bits(lhs.dtype):
        return _stock["binary_op"](self, lhs, rhs, op)
    out = op(value(lhs), value(rhs))
    return Handle(out, tl.int1) if out.dtype == np.bool_ else pack(out, lhs.dtype)


def unary_op(self, arg, op):
    return pack(op(value(arg)), arg.dtype) if is_bits(arg.dtype) else _stock["unary_op"](self, arg, op)


def create_fma(self, x, y, z):
    return pack(value(x) * value(y) + value(z), z.dtype) if is_bits(z.dtype) else _stock["create_fma"](self, x, y, z)


def cast_impl(self, src, dst_type):
    source, target = src.dtype.scalar, dst_type.scalar
    if source.name in TORCH_TYPES and target.name in TORCH_TYPES and source != target:
        return Handle(convert(src.data, source, target), target)
    if is_bits(source):
        src = Handle(value(src), tl.float32)
    return pack(src.data, target) if is_bits(target) else _stock["cast_impl"](self, src, dst_type)


def create_fp_to_fp(self, src, dst_type, rounding_mode):
    return Handle(convert(src.data, src.dtype, dst_type), dst_type.scalar)


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Products of fp16, bf16 and fp8 are exact in float32, where matrix units add them up."""
    if is_bits(a.dtype) or is_bits(b.dtype) or a.dtype.scalar.name == "fp16":
        product = np.matmul(value(a).astype(np.float32), value(b).astype(np.float32))
        return Handle((product + d.data).astype(d.data.dtype), d.dtype.scalar)
    return _stock["create_dot"](self, a, b, d, input_precision, max_num_imprecise_acc)


def check_tensor(stock):
    """The check of reductions and scans, which read the raw storage, extended by the types that would go wrong."""

    def check(self, inputs):
        for arg in inputs:
            if is_bits(arg.dtype):
                raise NotImplementedError(f"reduction or scan in {arg.dtype}: convert to float32 first")
        stock(self, inputs)

    return check


# ---------------------------------------------------------------------------------------------------- language patches
def patch_tensor(stock):
    def patch(tensor, scope):
        stock(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    return patch


def patch_core(stock):
    fnuz = {"fp8e4b8": tl.float8e4b8, "fp8e5b16": tl.float8e5b16}

    def patch(lang, scope):
        stock(lang, scope)
        to_ir = lang.dtype.to_ir
        scope.set_attr(lang.dtype, "to_ir", lambda self, builder: fnuz.get(self.name) or to_ir(self, builder))

    return patch


class FirstConfigDriver:
    """Lets `@triton.autotune` run: every configuration costs the same."""

    def get_benchmarker(self):
        def bench(call, quantiles=None, **_):
            call()
            return [1.0] * len(quantiles or (0.5,))

        return bench

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cpu")


# ------------------------------------------------------------------------------------------------------- tl.dot_scaled
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FP8 = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}


def _mx_values(tensor, fmt, k_axis):
    """Element values of a microscaling operand; e2m1 packs two along K in a byte, the low half first."""
    fmt = getattr(fmt, "value", fmt)
    data = tensor.handle.data
    if fmt == "e2m1":
        pairs = np.stack((_FP4[data & 15], _FP4[data >> 4]), axis=k_axis + 1)
        return pairs.reshape([n * 2 if axis == k_axis else n for axis, n in enumerate(data.shape)])
    if data.dtype == np.uint8:
        return convert(data, _FP8[fmt], tl.float32)
    return np.asarray(value(tensor.handle), np.float32)


def _mx_scale(scale, k):
    """(rows, K / group) e8m0 bytes -> (rows, K) factors 2 ** (byte - 127)."""
    exponents = scale.handle.data.astype(np.float32) - 127.0
    return np.repeat(np.exp2(exponents), k // exponents.shape[-1], axis=-1)


def dot_scaled(self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, acc, fast_math, *_):
    a, b = _mx_values(lhs, lhs_format, 1), _mx_values(rhs, rhs_format, 0)
    if lhs_scale is not None:
        a = a * _mx_scale(lhs_scale, a.shape[1])
    if rhs_scale is not None:
        b = b * _mx_scale(rhs_scale, b.shape[0]).T
    out = (a @ b).astype(np.float32)
    if acc is not None:
        out = out + acc.handle.data
    return tl.tensor(Handle(out, tl.float32), tl.block_type(tl.float32, list(out.shape)))


def _elementwise(function):
    def call(x, _semantic=None, **_):
        data = x.handle.data
        return tl.tensor(Handle(function(data).astype(data.dtype), x.handle.dtype), x.type)

    return call


_installed = False


def install():
    """Replace the broken parts, once in a process."""
    global _installed
    if _installed:
        return
    _installed = True
    for function in (binary_op, unary_op, create_fma, cast_impl, create_fp_to_fp, create_dot):
        setattr(Builder, function.__name__, function)
    for reduction in (interpreter.ReduceOps, interpreter.ScanOps):
        reduction.check_tensor = check_tensor(reduction.check_tensor)
    interpreter._patch_lang_tensor = patch_tensor(interpreter._patch_lang_tensor)
    interpreter._patch_lang_core = patch_core(interpreter._patch_lang_core)
    semantic.TritonSemantic.dot_scaled = dot_scaled
    for name in ("exp", "tanh", "sinh", "cosh", "log1p", "expm1", "rint", "trunc", "cbrt"):
        setattr(libdevice, name, _elementwise(getattr(np, name)))
    triton.runtime.driver.set_active(FirstConfigDriver())
    # a GPU does not warn about inf - inf or about masked lanes that divide by zero
    np.seterr(all="ignore")
