"""What weights cost by their size: the first version of a run at several sizes, and a picture of it beside the peers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from infra.cli.bench.weights.weights import WeightsPlan, run

# Figures that are added up, by their name in the picture.
CURVES = {
    "publish (target: 1)": ("trainer_v1",),
    "before the pause (1.5)": ("explorer_v1",),
    "anchor from the cache (1.5)": ("cached_anchor",),
    "safetensors: save, load": ("safetensors_save", "safetensors_load"),
    "xor + zstd: encode, apply": ("xor_encode", "xor_apply"),
}


def sweep(sizes: Sequence[float], share: float, out: Path, say: Callable[[str], None]) -> dict[float, dict[str, float]]:
    """Figures by size in GB; in `out` weights.json and weights.png, written anew after each size."""
    found: dict[float, dict[str, float]] = {}
    out.mkdir(parents=True, exist_ok=True)
    for gb in sorted(sizes):
        say(f"{gb:g} GB")
        found[gb] = run(WeightsPlan(gb=gb, share=share, versions=(1,), memory=False), say)
        (out / "weights.json").write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        draw(found, out / "weights.png")
    return found


def draw(found: Mapping[float, Mapping[str, float]], out: Path) -> None:
    """CPU seconds a GB over GB."""
    from infra.cli.demo.curves import draw_curves

    curves = {
        label: [[(gb, sum(one[f"{name}_cpu_s_per_gb"] for name in names)) for gb, one in found.items()]]
        for label, names in CURVES.items()
    }
    draw_curves({"weights": curves}, out, x="GB of bfloat16 weights", y="CPU seconds a GB", top=None)
