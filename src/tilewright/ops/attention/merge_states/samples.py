"""Random problems of `merge_states`, its edge cases, and calls that must fail."""

from collections.abc import Mapping
from typing import Any

import torch

from tilewright.dispatch import BadInput, Sample, Workload
from tilewright.ops import rows


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: N, B, H, S, D; form: by default stacks (N, B, H, S, D), "token" (stacks of (B, S, H, D), seen by head),
    "tokens" (stacks of (T, H, D) with T = B * S, the logarithms by head), "list" (N tensors), "pair" (two), "ring"
    (two, the first and the result float32), "parts" (float32 stacks, the result in `dtype`); spread: of the logarithms,
    by default 2; blind: of so many rows one of the first state, and of so many of these one of all states, saw no key.
    """
    g = rows.generator(seed)
    n, b, h, s, d = (params[name] for name in ("N", "B", "H", "S", "D"))
    form = params.get("form")
    state = torch.float32 if form == "parts" else dtype
    lse = rows.random_tensor((n, b, h, s), torch.float32, device, g, params.get("spread", 2.0))
    if "blind" in params:
        step, places = params["blind"], torch.arange(b * h * s, device=device).view(b, h, s)
        lse[0].masked_fill_(places % step == 0, -torch.inf)
        lse.masked_fill_(places % (step * step) == 0, -torch.inf)
    if form == "tokens":
        o = rows.random_tensor((n, b * s, h, d), state, device, g)
        return Sample((o, lse.transpose(1, 2).reshape(n, h, b * s).transpose(1, 2)))
    if form == "token":
        return Sample((rows.random_tensor((n, b, s, h, d), state, device, g).transpose(2, 3), lse))
    o = rows.random_tensor((n, b, h, s, d), state, device, g)
    if form == "parts":
        return Sample((o, lse), {"out_dtype": dtype})
    if form in ("list", "pair", "ring"):
        states = [x.clone() for x in o]
        if form == "ring":
            states[0] = states[0].float()
        return Sample((states, [x.clone() for x in lse]))
    return Sample((o, lse))


_SMALL = {"N": 2, "B": 2, "H": 3, "S": 7, "D": 64}


def _case(name: str, **params: Any) -> Workload:
    return Workload(name, {**_SMALL, **params})


EDGE_CASES = (
    _case("two: a few rows"),
    _case("rows: tiles of many rows and a bit", S=350, D=32),
    _case("one: nothing to add", N=1),
    _case("many: more states than are read at once, one of them with nearly all the weight", N=11, spread=40.0),
    _case("blind: states that saw no key, and rows that no state saw", blind=3, N=3),
    _case("token: by token in memory", form="token"),
    _case("tokens: without a batch, as of packed sequences", form="tokens"),
    _case("pair: two tensors where they lie", form="pair", blind=4),
    _case("ring: a float32 sum and the next state", form="ring"),
    _case("parts: float32 states, a result of the model's dtype", form="parts", N=5),
    _case("d_576: no power of two, latent heads", D=576, S=3),
    _case("odd_d: no row is aligned", D=33),
    _case("empty: no rows", B=0),
)


def _bad(name: str, match: str, *, o: Any = (2, 3, 4, 5, 16), lse: Any = (2, 3, 4, 5), **options: Any) -> BadInput:
    """Stacks of ones, with a change to shapes (or lists of shapes), dtypes or out_dtype."""

    def make(device: torch.device) -> Sample:
        def ones(shape: Any, dtype: torch.dtype) -> Any:
            if isinstance(shape, list):
                return [ones(each, dtype) for each in shape]
            return torch.ones(shape, device=device, dtype=dtype)

        kwargs = {"out_dtype": options["out_dtype"]} if "out_dtype" in options else {}
        dtypes = options.get("o_dtype", torch.float32), options.get("lse_dtype", torch.float32)
        return Sample((ones(o, dtypes[0]), ones(lse, dtypes[1])), kwargs)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("no states in a stack", r"needs N and D of at least 1", o=(0, 3, 4, 5, 16), lse=(0, 3, 4, 5)),
    _bad("no states in a list", "0 o and 0 lse", o=[], lse=[]),
    _bad("one lse too few", "2 o and 1 lse", o=[(3, 16), (3, 16)], lse=[(3,)]),
    _bad("a stack and a list", "o is a Tensor; needs two tensors", lse=[(3, 4, 5), (3, 4, 5)]),
    _bad("states of two shapes", "all must be alike", o=[(3, 16), (4, 16)], lse=[(3,), (4,)]),
    _bad("another lse", r"o is \(2, 3, 4, 5, 16\) and lse \(2, 3, 4, 6\)", lse=(2, 3, 4, 6)),
    _bad("four dimensions of rows", "one to three dimensions", o=(2, 3, 4, 5, 6, 16), lse=(2, 3, 4, 5, 6)),
    _bad("states without rows", "one to three dimensions", o=(2, 16), lse=(2,)),
    _bad("integers", "o is torch.int32", o_dtype=torch.int32),
    _bad("a rounded lse", "lse is torch.bfloat16 for o of torch.bfloat16; needs float32",
         o_dtype=torch.bfloat16, lse_dtype=torch.bfloat16),
    _bad("double result", "out_dtype is torch.float64", out_dtype=torch.float64),
)  # fmt: skip
