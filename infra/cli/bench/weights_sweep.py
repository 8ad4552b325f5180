"""What weights cost by their size: the first version of a run at several sizes, and a picture of it beside the peers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from infra.cli.bench.weights import WeightsPlan, run

# Figures that are added up, by their name in the picture.
CURVES = {
    "publish": ("trainer_v1",),
    "before the pause": ("explorer_v1",),
    "anchor from the cache": ("cached_anchor",),
    "safetensors: save, load": ("safetensors_save", "safetensors_load"),
    "xor + zstd: encode, apply": ("xor_encode", "xor_apply"),
}


def sweep(sizes: Sequence[float], share: float, out: Path, say: Callable[[str], None]) -> dict[float, dict[str, float]]:
    """Figures by size in GB; in `out` weights.json and weights.png, written anew after each size."""
    found: dict[float, dict[str, float]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for gb in sorted(sizes):
        found[gb] = run(WeightsPlan(gb=gb, share=share, versions=(1,), memory=False), say)
        (out / "weights.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        draw(found, out / "weights.png")
    return found


def draw(found: Mapping[float, Mapping[str, float]], out: Path) -> None:
    """CPU seconds a GB over GB."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
    for label, names in CURVES.items():
        points = [sum(one[f"{name}_cpu_s_per_gb"] for name in names) for one in found.values()]
        axis.plot(list(found), points, marker="o", label=label)
    for target, what in ((1.0, "target: publish"), (1.5, "target: before the pause")):
        axis.axhline(target, color="grey", linewidth=0.8, linestyle="--", label=f"{what}, {target:g}")
    axis.set(xlabel="GB of bfloat16 weights", ylabel="CPU seconds a GB", ylim=(0, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
