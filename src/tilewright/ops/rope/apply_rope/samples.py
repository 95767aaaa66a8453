"""Random arguments of `apply_rope`, laid out as in models, and calls that must fail."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Sample
from tilewright.ops import rows
from tilewright.ops.rope.tables import inverse_frequencies


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: H, H_kv, D, and B, S or for packed sequences T.

    Optional: `R`, `interleaved`, `table_dtype`, and
    layout     of q and k: "projected" (views of (B, S, H, D), the default), "contiguous", "fused" (one projection)
    tables     "one" for all (the default), "each" (one a sequence), "half" (W = R/2), "doubled" (columns twice)
    positions  number of rows of the table
    """
    rng = rows.generator(seed)
    packed = "T" in params
    b, s = (1, params["T"]) if packed else (params["B"], params["S"])
    q, k = _heads(params, b, s, dtype, device, rng)
    cos, sin = _tables(params, b, params.get("positions", s), dtype, device, rng)
    options: dict[str, Any] = {"interleaved": True} if params.get("interleaved") else {}
    if params.get("tables") in ("half", "doubled"):
        options["rotary_dim"] = params.get("R", params["D"])
    if "positions" in params:
        positions = torch.randint(0, params["positions"], (b, s), generator=rng).to(device)
        options["positions"] = positions[0] if packed else positions
    if packed:
        q, k = (x.transpose(1, 2)[0] for x in (q, k))
    if packed or "positions" in params:
        cos, sin = cos[0], sin[0]
    return Sample((q, k, cos, sin), options)


def _heads(
    params: Mapping[str, Any], b: int, s: int, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """q (B, H, S, D) and k (B, H_kv, S, D) in the layout of `params`."""
    h, h_kv, d = params["H"], params["H_kv"], params["D"]
    if params.get("layout") == "fused":
        fused = rows.random_tensor((b, s, h + 2 * h_kv, d), dtype, device, rng)
        q, k = fused[:, :, :h], fused[:, :, h : h + h_kv]
    else:
        q, k = (rows.random_tensor((b, s, heads, d), dtype, device, rng) for heads in (h, h_kv))
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    return (q.contiguous(), k.contiguous()) if params.get("layout") == "contiguous" else (q, k)


def _tables(
    params: Mapping[str, Any], b: int, length: int, dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """cos and sin, (B or 1, length, W), of positions from a random start below 1000."""
    kind = params.get("tables", "one")
    start = torch.randint(0, 1000, (b if kind == "each" else 1, 1), generator=rng)
    angles = (start + torch.arange(length)).float()[..., None] * inverse_frequencies(params.get("R", params["D"]))
    if kind == "doubled":
        angles = angles.repeat_interleave(2, dim=-1)
    elif kind != "half":
        angles = torch.cat((angles, angles), dim=-1)
    cos, sin = (t.to(device=device, dtype=params.get("table_dtype", dtype)) for t in (angles.cos(), angles.sin()))
    return (cos[..., ::2], sin[..., ::2]) if kind == "doubled" else (cos, sin)


def _bad(device: torch.device, **changes: Any) -> Sample:
    """A valid call, q (2, 4, 3, 8), k (2, 2, 3, 8), tables (1, 3, 8), with some arguments changed."""
    shapes = {"q": (2, 4, 3, 8), "k": (2, 2, 3, 8), "cos": (1, 3, 8), "sin": (1, 3, 8)}
    tensors = {name: torch.ones(changes.pop(name, shape), device=device) for name, shape in shapes.items()}
    for name in ("q", "k", "cos"):
        tensors[name] = tensors[name].to(changes.pop(f"{name}_dtype", torch.float32))
    return Sample(tuple(tensors.values()), changes)


BAD_INPUTS = (
    BadInput("k of other D", lambda d: _bad(d, k=(2, 2, 3, 6)), r"k is \(2, 2, 3, 6\)"),
    BadInput("k of other batch", lambda d: _bad(d, k=(1, 2, 3, 8)), r"k is \(1, 2, 3, 8\)"),
    BadInput("k of other dtype", lambda d: _bad(d, k_dtype=torch.float16), "needs one dtype"),
    BadInput("two dimensions", lambda d: _bad(d, q=(3, 8), k=(3, 8)), r"packed \(T, H, D\)"),
    BadInput("integers", lambda d: _bad(d, q_dtype=torch.int32), "q is torch.int32"),
    BadInput("wide tables", lambda d: _bad(d, cos=(1, 3, 10), sin=(1, 3, 10)), "cos has 10 columns"),
    BadInput("odd tables", lambda d: _bad(d, cos=(1, 3, 5), sin=(1, 3, 5)), "even rotary_dim"),
    BadInput("rotary_dim of neither width", lambda d: _bad(d, rotary_dim=4), "rotary_dim is 4"),
    BadInput("sin of other shape", lambda d: _bad(d, sin=(1, 3, 6)), "must have one shape"),
    BadInput("rows missing", lambda d: _bad(d, cos=(1, 2, 8), sin=(1, 2, 8)), r"needs \(2, 3\) or \(1, 3\)"),
    BadInput("a table without positions", lambda d: _bad(d, cos=(9, 8), sin=(9, 8)), "needs positions="),
    BadInput(
        "positions without a table",
        lambda d: _bad(d, positions=torch.zeros(2, 3, dtype=torch.int64, device=d)),
        r"must be a table \(P, columns\)",
    ),
    BadInput(
        "positions of another batch",
        lambda d: _bad(d, cos=(9, 8), sin=(9, 8), positions=torch.zeros(3, 3, dtype=torch.int64, device=d)),
        r"positions is \(3, 3\)",
    ),
    BadInput(
        "positions are floats",
        lambda d: _bad(d, cos=(9, 8), sin=(9, 8), positions=torch.zeros(2, 3, device=d)),
        "needs int32 or int64",
    ),
)
