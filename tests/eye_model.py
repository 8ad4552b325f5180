"""The smallest model that takes pictures, as tests build it, and what it is shown."""

from pathlib import Path
from random import Random

from actors.tasksets.shapes import Drawing, draw
from infra.cli.demo.char_model import MIN_HEAD_DIM, PICTURES, Size, build_char_model
from tests.tiny_models import build_tiny_internvl

SIZE = Size(hidden=16, layers=1, image=16, head_dim=MIN_HEAD_DIM)  # two by two places a picture
NUM_PLACES = 4


def build_eye_model(folder: Path, seed: int = 0, family: str = "llava") -> Path:
    if family == "internvl":
        return build_tiny_internvl(folder, seed, hidden=SIZE.hidden, layers=SIZE.layers)
    return build_char_model(folder, seed, PICTURES, SIZE)


def drawings(count: int, seed: int = 0) -> list[Drawing]:
    random = Random(seed)
    found = {one.picture: one for one in (draw("count", random, size=16) for _ in range(40 * count))}
    return list(found.values())[:count]
