"""Random problems of `sample`, what the bench measures, edge cases, and calls that must fail."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewright.dispatch import BadInput, Cost, Sample, Workload
from tilewright.ops import rows
from tilewright.ops.sampling import checks

_DTYPES = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}


def inputs(params: Mapping[str, Any], dtype: torch.dtype, device: torch.device, seed: int) -> Sample:
    """params: M rows, N tokens, scale of the logits, special (`checks.spoil`), equal (integers, of which many are
    alike), the parameters of `sample`, each a number or a tuple, whose values rows take in turn.
    """
    m, n = params["M"], params["N"]
    x = checks.logits(m, n, dtype, device, seed, params.get("scale", 3.0))
    if params.get("equal"):
        x = x.round()
    if params.get("special"):
        checks.spoil(x)
    kwargs: dict[str, Any] = {}
    for name, kind in _DTYPES.items():
        value = params.get(name)
        if isinstance(value, tuple):
            kwargs[name] = torch.tensor([value[i % len(value)] for i in range(m)], dtype=kind).to(device)
        elif value is not None:
            kwargs[name] = value
    if params.get("logprobs"):
        kwargs["logprobs"] = params["logprobs"]
    return Sample((x, *checks.seeds(m, device, seed)), kwargs)


def cost(sample: Sample, direction: str) -> Cost:
    """A weight an element, of some 20 operations; reads the logits once, as for a row that stays on the chip."""
    x = sample.args[0]
    parameters = [v for v in sample.kwargs.values() if isinstance(v, Tensor)]
    return Cost(20 * x.numel(), rows.nbytes(*sample.args, *parameters), 8 * x.shape[0])


_K, _P = (50, 20, 0, 1), (0.9, 0.95, 1.0, 0.5)
_ROWS = ((1, 131072), (32, 128256), (128, 131072))


def _speed(name: str, **params: Any) -> tuple[Workload, ...]:
    return tuple(Workload(f"{name}_{m}x{n}", {"M": m, "N": n, **params}, (torch.float32,), ("fwd",)) for m, n in _ROWS)


WORKLOADS = (
    *_speed("top_k_top_p", temperature=(0.8,), top_k=(50,), top_p=(0.9,)),
    *_speed("plain", temperature=(0.8,)),
    *_speed("top_k", temperature=(0.8,), top_k=(50,)),
    *_speed("top_p", temperature=(0.8,), top_p=(0.9,)),
    *_speed("mixed", temperature=(0.8, 0.0, 1.0), top_k=_K, top_p=_P, min_p=(0.0, 0.05), logprobs="model"),
)
CPU_WORKLOADS = (Workload("small", {"M": 16, "N": 32000, "top_k": (50,), "top_p": (0.9,)}, (torch.float32,), ("fwd",)),)


def _case(name: str, m: int, n: int, **params: Any) -> Workload:
    return Workload(name, {"M": m, "N": n, **params})


EDGE_CASES = (
    _case("one_row: a single program, no filter", 1, 256),
    _case("odd_n: the tail of a row is masked", 7, 333, top_k=5, top_p=0.9, temperature=0.7),
    _case("n_1: one token", 5, 1, top_k=3, top_p=0.5),
    _case("tensors: another value in each row", 9, 300, temperature=(1.0, 0.0, 0.3, 2.5), top_k=_K, top_p=_P,
          min_p=(0.0, 0.1, 1.0)),
    _case("sampled: log-probabilities after the filters", 8, 200, top_k=_K, top_p=_P, logprobs="sampled"),
    _case("model: log-probabilities before them", 8, 200, top_k=7, temperature=0.5, logprobs="model"),
    _case("equal: ties at every threshold", 12, 500, equal=True, top_k=_K, top_p=(0.5, 0.9, 0.99)),
    _case("special: ties, NaN, infinities, nothing", 8, 120, special=True, top_k=(3, 0), top_p=(0.9, 1.0),
          logprobs="sampled"),
    _case("tiny: a probability that none but the likeliest reaches", 5, 100, top_p=1e-9, min_p=1e-9),
    _case("greedy: no chance", 5, 100, temperature=0.0, logprobs="model"),
    _case("parts: a row divided among programs, rounds of pivots", 3, 17000, top_k=(40, 9000), top_p=(0.95,)),
    _case("flat: most tokens stay", 2, 17000, scale=0.5, top_p=0.9),
    _case("empty: no rows", 0, 64, top_k=5),
)  # fmt: skip


def _bad(name: str, match: str, **changes: Any) -> BadInput:
    """Four rows of ones with another argument: shapes of tensors by name, or values of parameters."""

    def make(device: torch.device) -> Sample:
        args = {
            "logits": torch.ones(4, 8, device=device),
            "seeds": torch.ones(4, dtype=torch.int64, device=device),
            "positions": torch.ones(4, dtype=torch.int64, device=device),
        }
        kwargs = {}
        for key, change in changes.items():
            if key in args:
                args[key] = change(args[key])
            else:
                kwargs[key] = change.to(device) if isinstance(change, Tensor) else change
        return Sample(tuple(args.values()), kwargs)

    return BadInput(name, make, match)


BAD_INPUTS = (
    _bad("integers", "logits is torch.int32", logits=lambda x: x.int()),
    _bad("vector", r"needs \(B, V\)", logits=lambda x: x[0]),
    _bad("no tokens", "may be 1 to", logits=lambda x: x[:, :0]),
    _bad("a seed too few", r"seeds is \(3,\)", seeds=lambda x: x[:3]),
    _bad("positions of 32 bits", "positions is .* torch.int32", positions=lambda x: x.int()),
    _bad("temperatures of a wrong dtype", "temperature is .* torch.float64", temperature=torch.ones(4).double()),
    _bad("top_k of another batch", r"top_k is \(2,\)", top_k=torch.ones(2, dtype=torch.int32)),
    _bad("negative temperature", "temperature is -1.0; needs a number at least 0", temperature=-1.0),
    _bad("top_p of 0", "top_p is 0.0; needs a number above 0", top_p=0.0),
    _bad("min_p above 1", "min_p is 1.5", min_p=1.5),
    _bad("unknown logprobs", "logprobs is 'all'", logprobs="all"),
)
