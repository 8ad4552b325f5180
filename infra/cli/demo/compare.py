"""Several demo runs in one picture: held-out accuracy over versions, one curve per control.

python -m infra.cli.demo.compare runs/none runs/shuffled runs/sft runs/rl --out curves.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from infra.cli.demo.settings import TASKS

LABELS = {
    "none": "{what}",
    "rl": "reinforcement alone",
    "sft": "demonstrations alone",
    "shuffled": "{what}, advantages shuffled",
}


def label_of(task: str, control: str, seed: int) -> str:
    """The name of a curve. A task without a weight on demonstrations is learned by reinforcement alone."""
    _, expert = TASKS[task].lanes["none"]
    what = "MIX: reinforcement and demonstrations" if expert else "reinforcement"
    return f"{LABELS[control].format(what=what)} (seed {seed})"


def draw(folders: Sequence[Path], out: Path) -> None:
    """Read the report.json of each run and write the picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for folder in folders:
        report = json.loads((folder / "report.json").read_text())
        points = report["accuracy"][TASKS[report["task"]].suite]
        label = label_of(report["task"], report["control"], report["seed"])
        axes.plot(
            [version for version, _ in points], [share for _, share in points], marker="o", markersize=3, label=label
        )
    axes.axhline(0.9, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel="policy version", ylabel=report["measure"], ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Entry point of `python -m infra.cli.demo.compare`."""
    parser = argparse.ArgumentParser(description="Draw the held-out accuracy of several demo runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders with a report.json")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    options = parser.parse_args()
    draw(options.runs, options.out)


if __name__ == "__main__":
    main()
