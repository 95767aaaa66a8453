"""Tensors without strides are refused in the op's own words, by the argument's name, whatever torch would say."""

import pytest
import torch

from tilewright import ops
from tilewright.errors import InputError

X = torch.arange(32.0).reshape(4, 8)
KINDS = {
    "coo": lambda: X.to_sparse(),
    "csr": lambda: X.to_sparse_csr(),
    "bsr": lambda: X.to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([X, X]),
    "jagged": lambda: torch.nested.nested_tensor([X, X[:2]], layout=torch.jagged),
    "mkldnn": lambda: X.to_mkldnn(),
}
W, ENDS = torch.ones(8), torch.tensor([2, 4], dtype=torch.int32)
CALLS = {
    "rms_norm: x": lambda t: ops.rms_norm(t, W),
    "rms_norm: weight": lambda t: ops.rms_norm(X, t),
    "add_rms_norm: residual": lambda t: ops.add_rms_norm(X, t, W),
    "layer_norm: bias": lambda t: ops.layer_norm(X, W, t),
    "softmax: x": lambda t: ops.softmax(t),
    "softmax : x": lambda t: ops.softmax(t, 0),
    "silu_and_mul: x": lambda t: ops.silu_and_mul(t),
    "swiglu: up": lambda t: ops.swiglu(X, t),
    "per_token_cast_to_fp8: x": lambda t: ops.per_token_cast_to_fp8(t),
    "dequantize: scales": lambda t: ops.dequantize(X.to(torch.float8_e4m3fn), t),
    "apply_rope: k": lambda t: ops.apply_rope(X.view(1, 1, 4, 8), t, X[None], X[None]),
    "matmul: a": lambda t: ops.matmul(t, X),
    "matmul: b": lambda t: ops.matmul(X, t, trans_b=True),
    "bmm: a": lambda t: ops.bmm(t, X[None]),
    "scaled_matmul: a": lambda t: ops.scaled_matmul(t, X, X, X),
    "grouped_matmul: b": lambda t: ops.grouped_matmul(X, t, ENDS),
    "quantize_weight: w": lambda t: ops.quantize_weight(t),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_refused_by_name(call, kind):
    op, _, name = call.replace(" :", ":").partition(": ")
    rank = op == "grouped_matmul" and kind not in ("nested", "jagged")  # its rank is looked at first
    words = "grouped_matmul: a is .* b is" if rank else f"{op}: {name} is (sparse|stored|a nested tensor)"
    for grad in (False, True):
        t = KINDS[kind]()
        with pytest.raises(InputError, match=words), torch.set_grad_enabled(grad):
            CALLS[call](t.requires_grad_() if grad and kind == "coo" else t)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["coo", "csr", "nested", "jagged"])
def test_refused_by_name_where_dense_tensors_are_replayed(kind):
    for _ in range(3):
        ops.softmax(X.cuda())
        with pytest.raises(InputError, match="softmax: x is (sparse|a nested tensor)"):
            ops.softmax(KINDS[kind]().cuda())
        with pytest.raises(InputError, match="rms_norm: weight is (sparse|a nested tensor)"):
            ops.rms_norm(X.cuda(), KINDS[kind]().cuda())


def test_what_has_strides_passes():
    plain = ops.rms_norm(X, W)
    torch.testing.assert_close(ops.rms_norm(X.t().contiguous().t(), W), plain)
    assert ops.rms_norm(X.to("meta"), W.to("meta")).is_meta
    made = torch.compile(lambda x: ops.softmax(x, 0), backend="aot_eager", fullgraph=True)(X)
    torch.testing.assert_close(made, torch.softmax(X, 0))
