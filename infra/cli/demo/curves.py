"""Curves of several seeds, in one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
MAX_CURVES = 3
MANY_CURVES = 6  # beyond them the legend lies outside of the panel


def draw_curves(
    panels: Mapping[str, Mapping[str, Sequence[Points]]],
    out: Path,
    *,
    x: str,
    y: str,
    target: float | None = None,
    top: float | None = 1.0,
    logarithmic: bool = False,
) -> None:
    """Draw one panel per title, with one curve per label: the mean over its seeds' points. A label has the same colour in all.
    top: end of the y axis, None for the highest point. logarithmic: both axes; then `top` is not used.

    Where a panel has at most MAX_CURVES curves, the seeds are thin lines beside the mean: more could not be distinguished.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = dict.fromkeys(label for curves in panels.values() for label in curves)
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(max(8.5 if len(labels) > MANY_CURVES else 6.5, 4.2 * len(panels)), 4.2),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    palette = pyplot.get_cmap("tab10" if len(labels) <= 10 else "tab20").colors
    colours = {label: palette[at % len(palette)] for at, label in enumerate(labels)}
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for label, seeds in curves.items():
            places = [place for place, _ in min(seeds, key=len)]
            values = [[value for _, value in one[: len(places)]] for one in seeds]
            means = [sum(column) / len(column) for column in zip(*values, strict=True)]
            axis.plot(places, means, label=label, linewidth=1.8, color=colours[label])
            for one in values if len(seeds) > 1 and len(curves) <= MAX_CURVES else ():
                axis.plot(places, one, linewidth=0.7, alpha=0.5, color=colours[label])
        if target is not None:
            axis.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        if logarithmic:
            axis.set(title=title, xlabel=x, xscale="log", yscale="log")
        else:
            axis.set(title=title, xlabel=x, ylim=(0, top))
        axis.grid(alpha=0.3)
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if len(curves) > MANY_CURVES else {}
        axis.legend(fontsize=8, **beside)
    axes[0][0].set_ylabel(y)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
