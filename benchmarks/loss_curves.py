r"""Judge and draw the loss curves that `training.py` wrote: is a contestant's mean off less than seeds are apart?

    python benchmarks/training.py --json FILE --seeds 5 --steps 200
    python benchmarks/loss_curves.py FILE [--plot PNG]

A point is the mean loss of some steps, so that single batches do not decide. At every point the mean over the seeds of
a contestant is held against that of eager; the difference may be as large as the standard deviation over eager's
seeds. `apart` is the largest difference of one step between two runs of one seed, which share weights and batches.
Exits with 1 where a curve leaves the spread.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

POINTS = 20


def curves(rows: list[dict], points: int) -> Tensor:
    """(seeds, points) means of consecutive steps; steps that fill no point are left out at the end."""
    loss = torch.tensor([row["loss"] for row in rows], dtype=torch.float64)
    steps = loss.shape[1] // points
    return loss[:, : steps * points].unflatten(1, (points, steps)).mean(-1)


def judged(rows: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    """For each contestant beside eager: its largest difference in spreads, where, and in one step of one seed."""
    points = min(POINTS, len(rows["eager"][0]["loss"]))
    eager = curves(rows["eager"], points)
    spread = eager.std(0)
    result = {}
    for name in rows.keys() - {"eager"}:
        off = (curves(rows[name], points).mean(0) - eager.mean(0)).abs()
        single = curves(rows[name], len(rows[name][0]["loss"])) - curves(rows["eager"], len(rows["eager"][0]["loss"]))
        worst = int((off / spread).argmax())
        result[name] = {
            "difference": float(off[worst]),
            "spread": float(spread[worst]),
            "ratio": float(off[worst] / spread[worst]),
            "apart": float(single.abs().max()),
        }
    return result


def draw(found: dict, path: Path) -> None:
    """The mean of each contestant, and the range of eager's seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    rows = found["rows"]
    points = min(POINTS, found["steps"])
    x = (torch.arange(points) + 0.5) * (found["steps"] // points)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    eager = curves(rows["eager"], points)
    axes.fill_between(x, eager.amin(0), eager.amax(0), alpha=0.2, label=f"eager, all {len(eager)} seeds")
    for style, (name, each) in zip(("-", "--", ":", "-."), rows.items(), strict=False):
        axes.plot(x, curves(each, points).mean(0), style, label=f"{name}, mean")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=f"Llama, {found['layers']} layers of {found['hidden']}")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main() -> None:
    """Print one line a contestant."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    found = json.loads(options.json.read_text())
    if found["seeds"] < 2:
        parser.error(f"{options.json} has one seed, which has no spread")
    left = []
    for name, row in sorted(judged(found["rows"]).items()):
        print(
            f"{name}: means differ by {row['difference']:.2e} where seeds spread by {row['spread']:.2e}, "
            f"ratio {row['ratio']:.2e}; one step of one seed by {row['apart']:.2e} at most"
        )
        if not row["ratio"] < 1:
            left.append(name)
    if options.plot:
        draw(found, options.plot)
    if left:
        raise SystemExit(f"outside the spread: {', '.join(left)}")


if __name__ == "__main__":
    main()
