"""A conversation that grows is tokenized once, and its ids are those of the whole."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from threading import current_thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.engine import Sampling
from actors.engines.scripted import ScriptedEngine
from actors.rollout.session import LONG_CHARS, Session
from infra.model.model import Tokenizer, load_tokenizer
from infra.model.pieces import Pieces, cuts
from schemas import Message
from tests.infra.chat_models import STYLES, build_chat_model

pytestmark = pytest.mark.slow  # importing transformers alone takes seconds

LONG = "How much is 37+45, and why is it so much?\n" * 120  # more than is tokenized in one go


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("models")
    return {name: load_tokenizer(build_chat_model(folder / name, style)) for name, style in STYLES.items()}


def conversation(*texts: str) -> list[dict[str, Any]]:
    return [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(texts)]


def whole(tokenizer: Tokenizer, said: list[dict[str, Any]]) -> list[int]:
    """What the library makes of it in one go."""
    rendered = tokenizer.wrapped.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.wrapped.backend_tokenizer.encode(rendered, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.text(st.characters(exclude_characters="<|>[]_", exclude_categories=["Co"]), max_size=20),
        min_size=3,
        max_size=9,
    )
)
def test_the_ids_of_a_conversation_that_grows_are_those_of_the_whole(
    tokenizers: dict[str, Tokenizer], style: str, texts: list[str]
) -> None:
    tokenizer = tokenizers[style]
    said = [LONG, *(text.encode("utf-8", "replace").decode() for text in texts)]
    said = said if len(said) % 2 else said[:-1]
    for number in range(1, len(said) + 1, 2):
        grown = conversation(*said[:number])
        assert tokenizer.encode_request(grown) == whole(tokenizer, grown)


@pytest.mark.parametrize("style", STYLES)
def test_of_a_conversation_that_grows_only_what_is_new_is_tokenized(
    tokenizers: dict[str, Tokenizer], style: str
) -> None:
    tokenizer = tokenizers[style]
    said = [f"{number} {LONG}" for number in range(25)]
    tokenizer.encode_request(conversation(*said))
    before = tokenizer.num_tokenized
    new = ["the answer", f"and then? {LONG}"]
    tokenizer.encode_request(conversation(*said, *new))
    added = tokenizer.num_tokenized - before
    assert sum(map(len, new)) <= added < sum(map(len, new)) + 200, "of 25 turns before it nothing"


def test_a_38k_token_turn_of_an_episode_tokenizes_what_is_new_and_that_off_the_loop(
    tokenizers: dict[str, Tokenizer], tmp_path: Path
) -> None:
    tokenizer = tokenizers["chatml"] if "chatml" in tokenizers else next(iter(tokenizers.values()))

    async def play() -> list[tuple[int, int]]:
        script = [*tokenizer.encode("Yes."), tokenizer.eos_ids[0]]
        engine = ScriptedEngine(num_vocabulary=tokenizer.num_tokens, max_model_len=10**6, script=lambda prompt: script)
        await engine.start()
        counted = OnLoop(tokenizer)
        session = Session(engine, counted, Sampling(max_tokens=64, stop=tokenizer.eos_ids))
        said: list[Message] = []
        counts = []
        while not counts or counts[-1][0] < 38_000:
            said.append(Message(role="user", content=f"{len(said)} {LONG}"))
            before = tokenizer.num_tokenized
            said.append(await session.reply(said))
            counts.append((len(session.parts.all[0].tokens), tokenizer.num_tokenized - before))
        assert session.num_parts == 1 and counted.on_loop < 2 * LONG_CHARS, "what comes before a conversation is long"
        return counts

    counts = asyncio.run(play())
    assert len(counts) > 5 and all(new < 2 * len(LONG) for _, new in counts), counts


class OnLoop:
    """Counts what of a conversation is tokenized in the thread of the event loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.loop, self.on_loop = tokenizer, current_thread(), 0

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        before = self.tokenizer.num_tokenized
        ids = self.tokenizer.encode_chat(messages)
        self.on_loop += (self.tokenizer.num_tokenized - before) * (current_thread() is self.loop)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


class Fake:
    """A tokenizer whose control tokens eat the blanks around them."""

    def __init__(self, **flags: Any) -> None:
        self._flags = {
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
            "content": "<c>",
        } | flags
        self.normalizer = None

    def flags(self) -> Any:
        return type("Added", (), self._flags)()

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        return {0: self.flags()}

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        """The first character of a text has an id of its own."""
        ids: list[int] = []
        for at, piece in enumerate(text.split("<c>")):
            ids += [0] if at else []
            ids += [ord(one) + (10_000 if not ids else 0) for one in piece]
        return type("Encoding", (), {"ids": ids})()


def test_where_control_tokens_do_not_part_what_stands_around_them_the_whole_is_tokenized() -> None:
    for one in (Fake(), Fake(lstrip=True), Fake(rstrip=True), Fake(single_word=True)):
        assert not cuts(one, {"<c>": one.flags()}, {"<c>": 0})


def test_what_is_remembered_is_bounded() -> None:
    import re

    from infra.model import pieces

    made = Pieces({"<c>": 0}, re.compile("<c>"), lambda texts: [[1] * len(text) for text in texts])
    for number in range(20):
        assert made.ids_of(f"{number:06d}" * 100_000 + "<c>") == [1] * 600_000 + [0]
    assert 0 < made._known.total_size <= pieces.MAX_TOKENS
