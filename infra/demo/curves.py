"""Curves of several seeds, in one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
MAX_BANDS = 3


def draw_curves(
    panels: Mapping[str, Mapping[str, Sequence[Points]]], out: Path, *, x: str, y: str, target: float | None = None
) -> None:
    """One panel per title; in it one curve per label: the mean over its seeds' points at the same places.

    A band reaches from the lowest to the highest seed where a panel has at most three curves: more could not be told apart.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(max(6.5, 4.2 * len(panels)), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for label, seeds in curves.items():
            places = [place for place, _ in min(seeds, key=len)]
            columns = list(zip(*([value for _, value in one[: len(places)]] for one in seeds), strict=True))
            (line,) = axis.plot(places, [sum(column) / len(column) for column in columns], label=label, linewidth=1.4)
            if len(seeds) > 1 and len(curves) <= MAX_BANDS:
                low, high = [min(column) for column in columns], [max(column) for column in columns]
                axis.fill_between(places, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
        if target is not None:
            axis.axhline(target, color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=title, xlabel=x, ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel(y)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
