"""The benchmark of the way of weights, as a command: one size with all its targets, or a sweep over sizes.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated

import typer

from infra.cli.bench.found import Found, tell


def weights(
    gb: Annotated[
        float, typer.Option(help="Weights in bfloat16, in 10⁹ bytes; about nine times as much memory.")
    ] = 0.5,
    share: Annotated[float, typer.Option(help="Of the values that a version moves.", min=0, max=1)] = 0.014,
    sizes: Annotated[
        str,
        typer.Option("--sweep", help="GB by commas, as in 0.1,0.5,2: one version at each size, and a picture of them."),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for weights.json and weights.png of a sweep.")] = Path("bench"),
    every: Annotated[
        bool, typer.Option("--every", help="Also `bench fan-out` and `bench reload`: all rows of the table of targets.")
    ] = False,
) -> Found:
    """The way of weights over 50 versions, from the trainer's copy to the file for an engine's workers, beside safetensors and
    xor. Minutes.
    """
    from infra.cli.bench.tables import figures_table
    from infra.cli.bench.weights import fan_out, reload
    from infra.cli.bench.weights import table as weights_table
    from infra.cli.bench.weights.sweep import CURVES, sweep
    from infra.cli.bench.weights.weights import WeightsPlan, run
    from schemas.errors import ConfigError

    if not sizes:
        found = {"weights": run(WeightsPlan(gb=gb, share=share), tell)}
        if every:
            found |= {"fan-out": fan_out.run(fan_out.FanOutPlan(), tell), "reload": reload.run()}
        shown = (figures_table(name, figures) for name, figures in found.items())
        figures = {name: value for one in found.values() for name, value in one.items()}
        return Found(figures, lambda: [*shown, weights_table.targets_table(found)], width=110)
    try:
        wanted = [float(size) for size in sizes.split(",")]
    except ValueError as error:
        raise ConfigError(f"--sweep: got {sizes!r}, expected numbers of GB by commas, as in 0.1,0.5,2") from error
    swept = sweep(wanted, share, out, tell)
    by_size = {f"{size:g}": figures for size, figures in swept.items()}
    return Found(by_size, lambda: [weights_table.sweep_table(swept, CURVES)], width=110)
