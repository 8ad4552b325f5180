"""The drawn taskset: the same seed draws the same, what is right by the score, and rows with bad images are named."""

import asyncio
from pathlib import Path
from random import Random

import msgspec
import pytest

from actors.tasksets.files import Broken, read_rows
from actors.tasksets.loader import FOLDER, with_images
from actors.tasksets.shapes import (
    DEV,
    HELD_OUT,
    KINDS,
    TRAIN,
    VALIDATION,
    Drawing,
    draw,
    drawn,
    glances,
    task_of,
    write_shapes,
)
from actors.tasksets.taskset import Demonstration
from infra.store.images import ImageReader, images_of
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Message, Span, Task, make_experience
from schemas.errors import ConfigError
from streams.scores.vision import Vision
from tests.actors.rig import memory_log


def scored(task: Task, response: str) -> float | None:
    return Vision()(
        make_experience(
            tokens=[0, 0], logprobs=[0.0], messages=(*task.messages, Message(role="assistant", content=response)),
            id="a.0.0-0-0", group="a.0", episode=0, group_size=1, spans=(Span(1, 2, 0),),
            answer=task.answer, meta=task.meta,
        )
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_answer_is_right_and_that_of_another_picture_is_not(kind: str) -> None:
    random = Random(3)
    tasks = [task_of(one, TRAIN) for one in drawn((kind,), 12, random)]  # type: ignore[arg-type]
    assert all(scored(task, task.answer or "") == 1.0 for task in tasks)
    wrong = next(one.answer for one in tasks if one.answer != tasks[0].answer)
    assert scored(tasks[0], wrong or "") == 0.0


def test_the_same_seed_draws_the_same_pictures_and_another_kind_is_refused() -> None:
    assert draw("count", Random(5)) == draw("count", Random(5)) != draw("count", Random(6))
    with pytest.raises(ConfigError, match="kinds"):
        draw("paint", Random(5))  # type: ignore[arg-type]


def test_who_glances_counts_one_short_more_often_than_not_and_never_too_high() -> None:
    drawings = [
        Drawing(kind="count", picture=bytes([at % 256, at // 256]), answer=str(at % 3 + 1)) for at in range(900)
    ]
    rows = list(glances(drawings, Random(1)))
    missed = [int(row.answer or "") - int(row.response) for row in rows]
    assert {one for row, one in zip(rows, missed, strict=True) if row.answer == "1"} == {0} and set(missed) == {0, 1}
    assert 0.52 < sum(missed) / 600 < 0.68  # 0.6 of those above one; 4 standard deviations are 0.08
    assert sum(row.split == VALIDATION for row in rows) == 90
    boxes = drawn(("box",), 20, Random(2))
    assert all(row.response == row.answer for row in glances(boxes, Random(3))), "a box has no count to miss"


def written(folder: Path) -> tuple[Path, Path]:
    return write_shapes(folder, num_train=12, num_held_out=4, num_dev=3, num_shown=10)


def test_splits_share_no_picture_and_every_one_is_loaded_once(tmp_path: Path) -> None:
    tasks_file, experts_file = written(tmp_path)
    store, broken = MemoryStore(), list[Broken]()
    tasks = list(with_images(read_rows(tasks_file, Task), tasks_file, store, broken.append))
    shown = list(with_images(read_rows(experts_file, Demonstration), experts_file, store, broken.append))
    assert not broken and len(tasks) == 19 and len(shown) == 10
    assert {split: sum(one.split == split for one in tasks) for split in (TRAIN, DEV, HELD_OUT)} == {
        TRAIN: 12, DEV: 3, HELD_OUT: 4,
    }  # fmt: skip
    images = [image for row in (*tasks, *shown) for image in images_of(row.messages)]
    assert len(set(images)) == 29 == len(list(store.keys(BLOBS)))
    assert all(pixels.shape == (32, 32, 3) for pixels in ImageReader(store).read_all(images))
    assert max(len(msgspec.json.encode(task)) for task in tasks) < 400, "a task holds references alone"


def test_a_row_whose_image_is_gone_or_none_is_named_and_the_others_are_loaded(tmp_path: Path) -> None:
    file, _ = written(tmp_path)
    tasks = list(read_rows(file, Task))
    gone, spoiled, again = (images_of(task.messages)[0] for task in tasks[:3])
    (tmp_path / FOLDER / gone.sha256).unlink()
    (tmp_path / FOLDER / spoiled.sha256).write_bytes(b"no picture")
    store, broken = MemoryStore(), list[Broken]()
    store.put(BLOBS + again.sha256, (tmp_path / FOLDER / again.sha256).read_bytes())
    (tmp_path / FOLDER / again.sha256).unlink()  # an earlier load brought it
    loaded = list(with_images(tasks, file, store, broken.append))
    assert loaded == tasks[2:]
    assert [tasks[0].id in broken[0].where, "missing" in broken[0].reason] == [True, True]
    assert [tasks[1].id in broken[1].where, "altered" in broken[1].reason] == [True, True]
    assert len(broken) == 2


def test_tasks_with_images_travel_through_the_log_as_references(tmp_path: Path) -> None:
    from actors.tasksets.loader import load_tasks
    from schemas.topics import TASKSET_RAW

    file, _ = written(tmp_path)
    tasks = list(read_rows(file, Task))

    async def main() -> list[object]:
        log = await memory_log()
        await load_tasks(log, tasks)
        return [message.value async for message in log.read_all(TASKSET_RAW)]

    found = {one.id: one for one in asyncio.run(main()) if isinstance(one, Task)}
    assert found == {task.id: task for task in tasks}
