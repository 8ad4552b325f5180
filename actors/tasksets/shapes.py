"""Drawn tasks about small pictures: count shapes, read a number, find the box. The same seed gives the same pictures.

A taskset with pictures is a folder: tasks.jsonl and experts.jsonl name each picture by its hash, and images/ holds the
bytes under these names, from where `headrace load` puts them into the object store.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from actors.tasksets.taskset import Demonstration, write_rows
from infra.store.images import image_named
from schemas import Image, Message, Task
from schemas.errors import ConfigError

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

TRAIN, HELD_OUT, DEV, VALIDATION = "train", "held-out", "dev", "validation"
IMAGES = "images"
Kind = Literal["count", "read", "box"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Rgb = tuple[int, int, int]
Box = tuple[int, int, int, int]
COLOURS: tuple[Rgb, ...] = ((214, 40, 40), (25, 96, 196), (20, 140, 60), (140, 40, 160), (0, 0, 0))
MOST = 3  # shapes in a picture that are counted
CELL = 8  # pixels a side of the grid they are in


class Drawing(msgspec.Struct, frozen=True):
    """A picture, and what is right to say about it. kind: of the question. picture: PNG. answer: exactly.

    Example: Drawing(kind="count", picture=b"...", answer="2")
    """

    kind: Kind
    picture: bytes
    answer: str

    @property
    def image(self) -> Image:
        return image_named(self.picture)


def draw(kind: Kind, random: Random, *, size: int = 32) -> Drawing:
    """One picture of size × size pixels. Raises ConfigError for a kind there is not."""
    from PIL import Image as Picture
    from PIL.ImageDraw import Draw

    canvas = Picture.new("RGB", (size, size), (255, 255, 255))
    pen = Draw(canvas)
    match kind:
        case "count":
            answer = _count(pen, random, size)
        case "read":
            answer = _read(pen, random, size)
        case "box":
            answer = _box(pen, random, size)
        case _:
            raise ConfigError(f"kinds: got {kind!r}, expected one of {', '.join(KINDS)}")
    held = io.BytesIO()
    canvas.save(held, format="PNG")
    return Drawing(kind=kind, picture=held.getvalue(), answer=answer)


def drawing_task(drawing: Drawing, split: str) -> Task:
    """The task that asks about a picture; what it is about goes to the score by `meta.kind`."""
    return Task(
        id=f"{drawing.kind}-{drawing.image.sha256[:16]}",
        messages=(Message(role="user", content=drawing.kind, images=(drawing.image,)),),
        answer=drawing.answer,
        split=split,
        meta={"kind": drawing.kind},
    )


def glances(drawings: list[Drawing], random: Random, *, short: float = 0.6) -> Iterator[Demonstration]:
    """Answers of a hasty reader. short: share of the counts above one that are one too low; the rest is right."""
    for index, drawing in enumerate(drawings):
        seen = drawing.answer
        if drawing.kind == "count" and seen != "1" and random.random() < short:
            seen = str(int(seen) - 1)
        task = drawing_task(drawing, VALIDATION if index % 10 == 9 else TRAIN)
        yield Demonstration(id=task.id, messages=task.messages, response=seen, answer=drawing.answer, split=task.split)


def drawn(kinds: tuple[Kind, ...], count: int, random: Random) -> list[Drawing]:
    """Pictures of the kinds in turn, all different."""
    found: dict[bytes, Drawing] = {}
    while len(found) < count:
        drawing = draw(kinds[len(found) % len(kinds)], random)
        found.setdefault(drawing.picture, drawing)
    return list(found.values())


def write_shapes(
    folder: Path,
    *,
    seed: int = 0,
    kinds: tuple[Kind, ...] = ("count",),
    num_train: int = 1500,
    num_held_out: int = 200,
    num_dev: int = 100,
    num_shown: int = 1600,
) -> tuple[Path, Path]:
    """Write tasks.jsonl, experts.jsonl and images/, as `headrace load` reads them; no split shares a picture."""
    random = Random(f"shapes/{seed}")
    pictures = drawn(kinds, num_train + num_held_out + num_dev + num_shown, random)
    splits = [HELD_OUT] * num_held_out + [DEV] * num_dev + [TRAIN] * num_train
    (folder / IMAGES).mkdir(parents=True, exist_ok=True)
    for drawing in pictures:
        (folder / IMAGES / drawing.image.sha256).write_bytes(drawing.picture)
    shown = pictures[len(splits) :]
    rows = [drawing_task(drawing, split) for drawing, split in zip(pictures, splits, strict=False)]
    return write_rows(folder, rows, glances(shown, random))


def _count(pen: "ImageDraw", random: Random, size: int) -> str:
    wanted, columns = random.randint(1, MOST), size // CELL
    for cell in random.sample(range(columns * columns), wanted):
        side = random.randint(4, 6)
        left = CELL * (cell % columns) + random.randint(0, CELL - 1 - side)
        top = CELL * (cell // columns) + random.randint(0, CELL - 1 - side)
        _shape(pen, random, (left, top, left + side, top + side))
    return str(wanted)


def _read(pen: "ImageDraw", random: Random, size: int) -> str:
    from PIL import ImageFont

    number = f"{random.randint(0, 99):02d}"
    place = (random.randint(2, size // 2 - 2), random.randint(2, size - 14))
    pen.text(place, number, fill=random.choice(COLOURS), font=ImageFont.load_default_imagefont())
    return number


def _box(pen: "ImageDraw", random: Random, size: int) -> str:
    width, height = random.randint(6, size // 2), random.randint(6, size // 2)
    left, top = random.randint(0, size - width), random.randint(0, size - height)
    pen.rectangle((left, top, left + width - 1, top + height - 1), fill=random.choice(COLOURS))
    return f"[[{left}, {top}, {left + width}, {top + height}]]"


def _shape(pen: "ImageDraw", random: Random, box: Box) -> None:
    colour, kind = random.choice(COLOURS), random.choice(("square", "circle", "triangle"))
    left, top, right, bottom = box
    if kind == "square":
        pen.rectangle(box, fill=colour)
    elif kind == "circle":
        pen.ellipse(box, fill=colour)
    else:
        pen.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=colour)
