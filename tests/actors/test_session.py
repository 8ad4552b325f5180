"""The session records exactly what was sampled, whatever a chat template makes of it afterwards."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from actors.engines.engine import Completion, LoadReport, Sampling
from actors.rollout.session import LONG_CHARS, CachedTokenizer, Session
from infra.policies.policy import Policy
from infra.store.images import Pixels
from schemas import Message, Span

BOS, END, NEWLINE = 1, 2, 3
FIRST_CHARACTER, FIRST_PAIR = 10, 1000


class Spelled:
    """A tokenizer with several spellings of a text: one token a character, or one for two equal ones.

    encode_chat writes each turn as BOS role text END, NEWLINE, and always spells with single characters.
    """

    def __init__(self, *, drops_first: bool = False) -> None:
        self.num_rendered = 0
        self._drops_first = drops_first

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        self.num_rendered += 1
        kept = messages[1:] if self._drops_first and len(messages) > 2 else messages
        tokens: list[int] = []
        for message in kept:
            tokens += [BOS, *spell(message.content), END, NEWLINE]
        return [*tokens, BOS]

    def decode(self, ids: Sequence[int]) -> str:
        text = ""
        for token in ids:
            if token >= FIRST_PAIR:
                text += chr(token - FIRST_PAIR) * 2
            elif token >= FIRST_CHARACTER:
                text += chr(token - FIRST_CHARACTER)
        return text


def spell(text: str) -> list[int]:
    return [FIRST_CHARACTER + ord(character) for character in text]


def pair(character: str) -> int:
    return FIRST_PAIR + ord(character)


class Answers:
    """An engine that answers from a list and remembers the prompts it was asked."""

    version = 7
    num_running = 0

    def __init__(self, *answers: Completion | Exception) -> None:
        self.prompts: list[tuple[int, ...]] = []
        self._answers = list(answers)

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, images: Sequence[Pixels] = ()) -> Completion:
        self.prompts.append(tuple(prompt))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def load(self, policy: Policy) -> LoadReport:
        raise NotImplementedError

    async def score_tokens(self, tokens: Sequence[int]) -> tuple[float, ...]:
        raise NotImplementedError


def answer(*tokens: int, versions: Sequence[int] = (), stop: int = END) -> Completion:
    versions = versions or [7] * len(tokens)
    starts = [i for i in range(len(tokens)) if i == 0 or versions[i] != versions[i - 1]]
    stops = [*starts[1:], len(tokens)]
    return Completion(
        tokens=tokens,
        logprobs=tuple(-0.5 - index for index in range(len(tokens))),
        spans=tuple(Span(start, end, versions[start]) for start, end in zip(starts, stops, strict=True)),
        stopped=tokens[-1] == stop,
    )


def user(text: str) -> Message:
    return Message(role="user", content=text)


SAMPLING = Sampling(max_tokens=8, stop=(END,))


def test_what_a_workflow_notes_leaves_the_meta_of_the_task_alone() -> None:
    session = Session(Answers(answer(*spell("42"), END)), Spelled(), SAMPLING)
    asyncio.run(session.reply((user("6*7"),)))
    session.note("tool_calls", 2)
    session.finish("truncated", "max_turns")
    meta = {"tool_calls": 9, "truncated": "by nobody", "failure": "none"}
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0, meta=meta)
    assert (experience.meta, experience.notes) == (meta, {"tool_calls": 2})
    assert (experience.end, experience.truncated, experience.failure) == ("truncated", "max_turns", "")


def test_a_single_turn_is_its_prompt_and_what_was_sampled() -> None:
    engine = Answers(answer(*spell("42"), END))
    session = Session(engine, Spelled(), SAMPLING)
    reply = asyncio.run(session.reply((user("6*7"),)))
    assert reply == Message(role="assistant", content="42")
    (experience,) = session.experiences(group="t.0", attempt=1, episode=3, group_size=4, answer="42", meta={"level": 1})
    prompt = [BOS, *spell("6*7"), END, NEWLINE, BOS]
    assert experience.tokens.tolist() == [*prompt, *spell("42"), END]
    assert experience.spans == (Span(len(prompt), len(prompt) + 3, 7),)
    assert experience.id == "t.0.1-3-0" and experience.last and experience.end == "terminal"
    assert experience.messages == (user("6*7"), reply)
    assert (experience.answer, experience.meta) == ("42", {"level": 1})
    assert experience.logprobs.tolist() == [-0.5, -1.5, -2.5]


def test_a_second_turn_keeps_the_sampled_spelling_and_adds_only_the_observation() -> None:
    first = (pair("a"), *spell("b"), END)  # the template would spell "aab" otherwise
    engine = Answers(answer(*first), answer(*spell("ok"), END, versions=[7, 8, 8]))
    session = Session(engine, Spelled(), SAMPLING)

    async def talk() -> None:
        history = [user("go")]
        history.append(await session.reply(history))
        assert history[-1].content == "aab"
        history.append(user("more"))
        await session.reply(history)

    asyncio.run(talk())
    second = (*engine.prompts[0], *first, NEWLINE, BOS, *spell("more"), END, NEWLINE, BOS)
    assert engine.prompts[1] == second
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    assert experience.tokens.tolist() == [*second, *spell("ok"), END]
    one, two = len(engine.prompts[0]), len(second)
    assert experience.spans == (Span(one, one + 3, 7), Span(two, two + 1, 7), Span(two + 1, two + 3, 8))
    assert experience.num_sampled == len(experience.logprobs) == 6


@pytest.mark.parametrize("sampled", [spell("aab"), [pair("a"), *spell("b")]])
def test_a_turn_cut_by_its_length_is_closed_by_the_template(sampled: list[int]) -> None:
    engine = Answers(answer(*sampled), answer(END))
    session = Session(engine, Spelled(), SAMPLING)

    async def talk() -> None:
        reply = await session.reply([user("go")])
        assert not session.stopped
        await session.reply([user("go"), reply, user("on")])

    asyncio.run(talk())
    tail = (END, NEWLINE, BOS, *spell("on"), END, NEWLINE, BOS)
    assert engine.prompts[1] == (*engine.prompts[0], *sampled, *tail)


def test_what_was_sampled_is_kept_where_the_template_drops_text() -> None:
    engine = Answers(answer(*spell("x"), END), answer(*spell("y"), END))
    session = Session(engine, Spelled(drops_first=True), SAMPLING)

    async def talk() -> None:
        reply = await session.reply([user("go")])
        await session.reply([user("go"), reply, user("on")])

    asyncio.run(talk())
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    tail = [NEWLINE, BOS, *spell("on"), END, NEWLINE, BOS]
    assert experience.tokens.tolist() == [*engine.prompts[0], *spell("x"), END, *tail, *spell("y"), END]


class LastAlone(Spelled):
    """Its template writes the last message alone: what follows an answer cannot be told from it."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return super().encode_chat(messages[-1:])


def test_a_template_that_does_not_say_what_follows_an_answer_begins_a_new_part() -> None:
    engine = Answers(answer(*spell("x"), END), answer(*spell("y"), END))
    session = Session(engine, LastAlone(), SAMPLING)

    async def talk() -> None:
        reply = await session.reply([user("go")])
        await session.reply([user("go"), reply, user("on")])

    asyncio.run(talk())
    first, second = session.experiences(group="t.0", attempt=0, episode=0)
    assert (first.part, first.last, second.part, second.last) == (0, False, 1, True)
    assert first.tokens.tolist() == [*engine.prompts[0], *spell("x"), END]
    assert second.tokens.tolist() == [*engine.prompts[1], *spell("y"), END]
    assert second.id == "t.0.0-0-1"


@pytest.mark.parametrize(
    "rewritten",
    [
        [user("other"), Message(role="assistant", content="x"), user("on")],
        [user("go"), Message(role="assistant", content="edited"), user("on")],
        [user("go")],
    ],
)
def test_rewritten_history_begins_a_new_part(rewritten: list[Message]) -> None:
    engine = Answers(answer(*spell("x"), END), answer(*spell("y"), END))
    session = Session(engine, Spelled(), SAMPLING)

    async def talk() -> None:
        await session.reply([user("go")])
        await session.reply(rewritten)

    asyncio.run(talk())
    parts = session.experiences(group="t.0", attempt=0, episode=0)
    assert [part.num_sampled for part in parts] == [2, 2]
    assert engine.prompts[1] == tuple(Spelled().encode_chat(rewritten))


def test_what_was_sampled_before_an_error_is_kept_as_a_failed_episode() -> None:
    engine = Answers(answer(*spell("x"), END), RuntimeError("gone"), answer(*spell("z"), END))
    session = Session(engine, Spelled(), SAMPLING)

    async def talk() -> None:
        reply = await session.reply([user("go")])
        history = [user("go"), reply, user("on")]
        with pytest.raises(RuntimeError, match="gone"):
            await session.reply(history)
        (failed,) = session.experiences(group="t.0", attempt=0, episode=0, failure="gone")
        assert failed.end == "failed" and failed.failure == "gone"
        assert failed.tokens.tolist() == [*engine.prompts[0], *spell("x"), END]
        await session.reply(history)  # and the turn can be tried again

    asyncio.run(talk())
    assert engine.prompts[1] == engine.prompts[2]
    assert len(session.experiences(group="t.0", attempt=0, episode=0)) == 1


def test_a_session_without_a_turn_still_completes_its_group() -> None:
    session = Session(Answers(), Spelled(), SAMPLING)
    (empty,) = session.experiences(group="t.0", attempt=0, episode=5, failure="no environment")
    assert empty.num_tokens == 0 and empty.last and empty.end == "failed" and empty.spans == ()


def test_an_answer_cut_by_its_length_is_truncated() -> None:
    session = Session(Answers(answer(*spell("xx"))), Spelled(), SAMPLING)
    asyncio.run(session.reply([user("go")]))
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    assert experience.end == "truncated"


def test_no_conversation_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="messages"):
        asyncio.run(Session(Answers(), Spelled(), SAMPLING).reply([]))


def test_a_group_renders_its_prompt_once() -> None:
    tokenizer = Spelled()
    room = sum(len(Spelled().encode_chat([user(text)])) for text in ("go", "a"))
    cached = CachedTokenizer(tokenizer, max_tokens=room)
    for _ in range(3):
        assert cached.encode_chat([user("go")]) == Spelled().encode_chat([user("go")])
    assert tokenizer.num_rendered == 1
    for text in ("a", "b", "go"):  # the oldest is forgotten
        cached.encode_chat([user(text)])
    assert tokenizer.num_rendered == 4
    assert cached.decode(spell("x")) == "x"


class ThreadNotes(Spelled):
    """Notes in which thread it rendered."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[bool] = []

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        return super().encode_chat(messages)


def test_a_long_conversation_is_tokenized_away_from_the_event_loop_and_once_for_a_group() -> None:
    async def main(text: str) -> list[bool]:
        watched = ThreadNotes()
        cached = CachedTokenizer(watched)
        await asyncio.gather(*(Session(Answers(answer(END)), cached, SAMPLING).reply([user(text)]) for _ in range(8)))
        return watched.threads

    assert asyncio.run(main("x" * (LONG_CHARS + 1))) == [False]
    assert asyncio.run(main("x" * LONG_CHARS)) == [True]
