"""Pictures in requests, with the clients people have, and in programs: shown to the engine, bounded, recorded by reference."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image as Pillow

from actors.engines.engine import Engine, Sampling
from actors.gateway.config import RedactRules
from actors.program.workflow import Program
from actors.rollout.session import Session
from infra.store.images import ImageReader, decode_image, deposit_image
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Experience, Message, Score, Task
from tests.actors.gateway.gateway_rig import (
    EOS,
    VOCABULARY,
    ByteTokenizer,
    ask_chat,
    ask_messages,
    ask_responses,
    says,
    serving,
)
from tests.actors.rig import Looking
from tests.tiny_models import drawings

ONE, OTHER = drawings(2)
KEEP = RedactRules(images="keep")


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def asked(*pictures: str, text: str = "What is it?") -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": one, "detail": "low"}} for one in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


class Eyes(ByteTokenizer):
    """Its template writes a byte for each image."""

    takes_images = True

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        shown = [{**one, "content": "\x01" * one.get("images", 0) + one["content"]} for one in conversation]
        return super().encode_request(shown, tools)


def looks(*texts: str) -> Looking:
    return Looking(num_vocabulary=VOCABULARY, max_model_len=4096, script=says(*(texts or ("A ring.",))))


PNG = base64.b64encode(ONE.picture).decode()
SHOWN: dict[Any, list[dict[str, Any]]] = {
    ask_chat: asked(url(ONE.picture))[0]["content"],
    ask_responses: [{"type": "input_image", "image_url": url(ONE.picture)}, {"type": "input_text", "text": "What is it?"}],
    ask_messages: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
        {"type": "text", "text": "What is it?"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ask", SHOWN)
async def test_a_picture_is_shown_to_the_engine_and_recorded_by_reference(
    tmp_path: Path, ask: Any, stream: bool
) -> None:
    looking, store = looks(), MemoryStore()
    async with serving(tmp_path, looking, tokenizer=Eyes(), store=store, redact=KEEP) as served:
        key = await served.new_key()
        first = await ask(served, key, [{"role": "user", "content": SHOWN[ask]}], stream=stream)
        assert first.said == "A ring."
        if ask is ask_responses:  # what is gone on from shows the picture again
            await ask(served, key, [{"role": "user", "content": "Sure?"}], previous_response_id=first.id)
        found = await served.recorded(len(looking.seen))
        for shown, experience in zip(looking.seen, found, strict=True):
            assert np.array_equal(shown[0], decode_image(ONE.image, ONE.picture))
            assert experience.messages[0].images == (ONE.image,)
            assert experience.messages[0].content == "What is it?"
        assert store.get(BLOBS + ONE.image.sha256) == ONE.picture, "where the trainer looks for it"


@pytest.mark.parametrize(
    ("redact", "user", "reason"),
    [(RedactRules(), None, "pictures"), (KEEP, "ann@example.org", "pictures of a named user")],
)
async def test_what_shows_pictures_is_not_written_unless_it_may_be_and_never_of_a_named_user(
    tmp_path: Path, redact: RedactRules, user: str | None, reason: str
) -> None:
    store = MemoryStore()
    async with serving(tmp_path, looks(), tokenizer=Eyes(), store=store, redact=redact) as served:
        client = await served.opened()
        more: Any = {} if user is None else {"user": user}
        answer = await client.chat.completions.create(model="m", messages=asked(url(ONE.picture)), **more)
        assert answer.choices[0].message.content == "A ring.", "it is served all the same"
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
        (written,) = await served.recorded(1)
        assert written.messages[0].content == "Hi"
        counted = {name: value for name, value in served.metrics.counters().items() if "not_recorded" in name}
        assert [(reason in name, value) for name, value in counted.items()] == [(True, 1)]
        assert not list(store.keys(BLOBS)), "nothing of it is kept"


async def test_a_session_goes_on_with_its_picture_and_not_with_another(tmp_path: Path) -> None:
    async with serving(tmp_path, looks(), tokenizer=Eyes(), redact=KEEP) as served:
        client = (await served.opened()).with_options(default_headers={"x-session-id": "s"})
        await client.chat.completions.create(model="m", messages=asked(url(ONE.picture)))
        turn: list[Any] = [{"role": "assistant", "content": "A ring."}, {"role": "user", "content": "Sure?"}]
        await client.chat.completions.create(model="m", messages=[*asked(url(OTHER.picture)), *turn])
        await client.chat.completions.create(model="m", messages=asked(url(ONE.picture)))
        await client.chat.completions.create(model="m", messages=[*asked(url(ONE.picture)), *turn])
        assert [one.carried for one in await served.recorded(4)] == [0, 0, 0, 1]


def flat(side: int) -> bytes:
    file = io.BytesIO()
    Pillow.new("1", (side, side)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("pictures", "code", "words"),
    [
        (["https://example.org/a.png"], "field_not_accepted", "nothing is fetched"),
        (["file:///etc/passwd"], "field_not_accepted", "nothing is fetched"),
        ([url(b"GIF89a", "image/gif")], "field_not_accepted", "image/gif"),
        (["data:image/png;base64,***"], None, "not base64"),
        ([url(b"no picture")], "invalid_image", "not an image|no image/png"),
        ([url(ONE.picture[:-30])], "invalid_image", "no image/png"),
        ([url(flat(9000))], "invalid_image", "expected at most 4194304 pixels"),
        ([url(flat(1800)), url(flat(1800))], "invalid_image", "image 1: .*expected at most 954304 pixels"),
        ([url(ONE.picture)] * 9, None, "got 9 images, expected at most 8"),
    ],
)
async def test_a_picture_that_cannot_be_taken_is_refused_by_its_place(
    tmp_path: Path, pictures: list[str], code: str | None, words: str
) -> None:
    looking = looks()
    async with serving(tmp_path, looking, tokenizer=Eyes()) as served:
        key = await served.new_key()
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            await served.client(key).chat.completions.create(model="m", messages=asked(*pictures))
        assert (refused.value.code, str(refused.value.param)[:8]) == (code, "messages")
        assert not looking.seen


async def test_a_model_of_text_alone_is_shown_no_picture_and_an_assistant_shows_none(tmp_path: Path) -> None:
    async with serving(tmp_path, looks()) as served:
        create = (await served.opened()).chat.completions.create
        with pytest.raises(openai.BadRequestError, match="this model reads only text"):
            await create(model="m", messages=asked(url(ONE.picture)))
        with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\]: expected image_url"):
            shown: Any = {**asked(url(ONE.picture))[0], "role": "assistant"}
            await create(model="m", messages=[shown])


TASK = Task(id="t", messages=(Message(role="user", content="count", images=(ONE.image,)),), answer="1", split="train")


class ChatEyes(Eyes):
    """One that a session can use too."""

    def encode_chat(self, messages: Any) -> list[int]:
        return self.encode_request([{"role": message.role, "content": message.content} for message in messages])


async def counts(task: dict[str, Any], base_url: str, key: str) -> float:
    """Two turns over one picture, which the task shows."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        messages = task["messages"]
        first = await client.chat.completions.create(model="m", messages=messages)
        said: list[Any] = [
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": "count"},
        ]
        await client.chat.completions.create(model="m", messages=[*messages, *said])
        return 1.0


def play(
    engine: Engine, tokenizer: Any, store: MemoryStore, sampling: Sampling, program: str = counts.__name__
) -> tuple[Experience, ...]:
    deposit_image(store, ONE.image, ONE.picture)

    async def run() -> tuple[tuple[Score, ...], tuple[Experience, ...]]:
        await engine.start()
        try:
            session = Session(engine, tokenizer, sampling, ImageReader(store))
            scores = await Program(use=f"{__name__}:{program}")(TASK, session)
            return scores, tuple(session.experiences(group="t.0", attempt=0, episode=0))
        finally:
            await engine.close()

    scores, found = asyncio.run(run())
    assert scores == (Score(name="program", value=1.0),)
    return found


def test_a_program_is_told_the_tasks_picture_and_what_it_asks_of_it_is_one_sequence() -> None:
    store, looking = MemoryStore(), looks("One.", "Two.")
    (experience,) = play(looking, ChatEyes(), store, Sampling(max_tokens=64, stop=(EOS,)))
    assert [len(shown) for shown in looking.seen] == [1, 1]
    assert [message.images for message in experience.messages] == [(ONE.image,), (), (), ()]


async def shows_another(base_url: str, key: str) -> float:
    """A picture of its own."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        await client.chat.completions.create(model="m", messages=asked(url(OTHER.picture)))
        return 1.0


def test_a_picture_that_a_program_shows_lies_where_the_trainer_looks() -> None:
    store = MemoryStore()
    (experience,) = play(looks(), ChatEyes(), store, Sampling(max_tokens=64, stop=(EOS,)), shows_another.__name__)
    assert experience.messages[0].images == (OTHER.image,)
    assert store.get(BLOBS + OTHER.image.sha256) == OTHER.picture
