"""The session records exactly what was sampled, whatever a chat template, a thought or a picture makes of it."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from openai.types.chat import ChatCompletionMessage

from actors.engines.engine import Completion, LoadReport, Sampling
from actors.engines.scripted import ScriptedEngine
from actors.rollout.session import Session
from infra.log.log import Log
from infra.model.model import Tokenizer, load_tokenizer
from infra.observe.metrics import Metrics
from infra.policies.policy import Policy
from infra.store.images import MISSING, Pixels, deposit_image
from infra.store.memory import MemoryStore
from schemas import DropMarker, Image, Issued, Message, Span, Task
from schemas.topics import EXPERIENCES, TASKS, VERIFIED
from tests.actors.gateway.gateway_rig import EOS as BYTE_EOS
from tests.actors.gateway.gateway_rig import ByteTokenizer, engine, says, serving
from tests.actors.rig import EOS, EXPLORE, FLOOR, CharTokenizer, Looking, TopicArrivals, memory_log, running, until
from tests.infra.chat_models import STYLES, build_chat_model
from tests.role import role_of
from tests.tiny_models import drawings

BOS, END, NEWLINE = 1, 2, 3
FIRST_CHARACTER, FIRST_PAIR = 10, 1000


class Spelled:
    """A tokenizer with several spellings of a text: one token a character, or one for two equal ones.

    encode_chat writes each turn as BOS role text END, NEWLINE, and always spells with single characters.
    """

    def __init__(self, *, drops_first: bool = False) -> None:
        self._drops_first = drops_first

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
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


async def test_a_second_turn_keeps_the_sampled_spelling_and_adds_only_the_observation() -> None:
    first = (pair("a"), *spell("b"), END)  # the template would spell "aab" otherwise
    engine = Answers(answer(*first), answer(*spell("ok"), END, versions=[7, 8, 8]))
    session = Session(engine, Spelled(), SAMPLING)

    history = [user("go")]
    history.append(await session.reply(history))
    assert history[-1].content == "aab"
    history.append(user("more"))
    await session.reply(history)
    second = (*engine.prompts[0], *first, NEWLINE, BOS, *spell("more"), END, NEWLINE, BOS)
    assert engine.prompts[1] == second
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    assert experience.tokens.tolist() == [*second, *spell("ok"), END]
    one, two = len(engine.prompts[0]), len(second)
    assert experience.spans == (Span(one, one + 3, 7), Span(two, two + 1, 7), Span(two + 1, two + 3, 8))
    assert experience.num_sampled == len(experience.logprobs) == 6


@pytest.mark.parametrize("sampled", [spell("aab"), [pair("a"), *spell("b")]])
async def test_a_turn_cut_by_its_length_is_closed_by_the_template(sampled: list[int]) -> None:
    engine = Answers(answer(*sampled), answer(END))
    session = Session(engine, Spelled(), SAMPLING)

    reply = await session.reply([user("go")])
    assert not session.stopped
    await session.reply([user("go"), reply, user("on")])
    tail = (END, NEWLINE, BOS, *spell("on"), END, NEWLINE, BOS)
    assert engine.prompts[1] == (*engine.prompts[0], *sampled, *tail)


class LastAlone(Spelled):
    """Its template writes the last message alone: what follows an answer cannot be told from it."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return super().encode_chat(messages[-1:])


async def test_a_template_that_does_not_say_what_follows_an_answer_begins_a_new_part() -> None:
    engine = Answers(answer(*spell("x"), END), answer(*spell("y"), END))
    session = Session(engine, LastAlone(), SAMPLING)

    reply = await session.reply([user("go")])
    await session.reply([user("go"), reply, user("on")])
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
async def test_rewritten_history_begins_a_new_part(rewritten: list[Message]) -> None:
    engine = Answers(answer(*spell("x"), END), answer(*spell("y"), END))
    session = Session(engine, Spelled(), SAMPLING)

    await session.reply([user("go")])
    await session.reply(rewritten)
    parts = session.experiences(group="t.0", attempt=0, episode=0)
    assert [part.num_sampled for part in parts] == [2, 2]
    assert engine.prompts[1] == tuple(Spelled().encode_chat(rewritten))


TURNS = 20


# As Qwen3 has it: what earlier answers thought is left out.
FORGETS = (
    "{%- set said = message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' "
    "else message.content %}"
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("styles")
    chatml = STYLES["chatml"]
    loop = "{%- for message in messages %}"
    assert loop in chatml.template
    template = chatml.template.replace(loop, loop + FORGETS).replace("+ message.content }}", "+ said }}")
    styles = {**STYLES, "forgets": msgspec.structs.replace(chatml, template=template)}
    return {name: load_tokenizer(build_chat_model(folder / name, style)) for name, style in styles.items()}


def thought(number: int) -> str:
    return f"<think>\nlet me see {number}\n</think>\n\nThe answer is {number}. \n"


AGENTS: dict[str, Callable[[str], str]] = {
    "as it came": lambda text: text,
    "without blanks around": str.strip,
    "without the thought": lambda text: text.split("</think>")[1].strip(),
}


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("style", [*STYLES, "forgets"])
async def test_twenty_turns_are_one_sequence_whatever_becomes_of_thoughts_and_blanks(
    tokenizers: dict[str, Tokenizer], style: str, agent: str
) -> None:
    tokenizer = tokenizers[style]
    end = tokenizer.eos_ids[0]
    sampled = [(*tokenizer.encode(thought(number)), end) for number in range(TURNS)]
    answers = [
        Completion(tokens=item, logprobs=(-1.0,) * len(item), spans=(Span(0, len(item), 0),), stopped=True)
        for item in sampled
    ]
    sampler = Answers(*answers)
    session = Session(sampler, tokenizer, Sampling(max_tokens=99, stop=tokenizer.eos_ids))

    conversation = [user("begin")]
    for number in range(TURNS):
        reply = await session.reply(conversation)
        sent = msgspec.structs.replace(reply, content=AGENTS[agent](reply.content))
        conversation += [sent, user(f"and {number}?")]
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    assert experience.num_sampled == sum(map(len, sampled)), "each sampled token is in it once"
    for before, after, entry in zip(sampler.prompts, sampler.prompts[1:], sampled, strict=False):
        assert after[: len(before) + len(entry)] == before + entry
    # Behind each answer stands what the template writes behind a plain one.
    plain = tokenizer.encode_chat([user("?"), Message(role="assistant", content="x"), user("and 3?")])
    behind = plain[plain.index(end, len(tokenizer.encode_chat([user("?")]))) + 1 :]
    assert list(sampler.prompts[4][len(sampler.prompts[3]) + len(sampled[3]) :]) == behind


class ForgetfulBytes(ByteTokenizer):
    """Its template leaves out what earlier answers thought."""

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        said = [{**item, "content": item["content"].split("</think>")[-1].lstrip("\n")} for item in conversation]
        return super().encode_request(said, tools)


def apart(answer: ChatCompletionMessage) -> dict[str, Any]:
    return answer.model_dump(exclude_none=True)


CLIENTS: dict[str, Callable[[ChatCompletionMessage], dict[str, Any]]] = {
    "as it came": apart,
    "by the older name": lambda item: {**apart(item), "reasoning": None, "reasoning_content": apart(item)["reasoning"]},
    "in the content": lambda item: {
        "role": "assistant",
        "content": f"<think>{apart(item)['reasoning']}</think>{item.content}",
    },
    "without blanks around": lambda item: {**apart(item), "content": (item.content or "").strip()},
    "without the thought": lambda item: {"role": "assistant", "content": item.content},
}


@pytest.mark.parametrize("agent", CLIENTS)
async def test_through_the_gateway_too_the_turns_of_a_session_go_on_from_what_was_sampled(
    tmp_path: Path, agent: str
) -> None:
    texts = [thought(number) for number in range(4)]
    async with serving(tmp_path, engine(says(*texts)), tokenizer=ForgetfulBytes()) as served:
        client = (await served.opened()).with_options(default_headers={"x-session-id": "s"})
        conversation: list[Any] = [{"role": "user", "content": "begin"}]
        for text in texts:
            answer = await client.chat.completions.create(model="m", messages=conversation)
            message = answer.choices[0].message
            assert f"<think>{apart(message)['reasoning']}</think>{message.content}" == text
            conversation += [CLIENTS[agent](message), {"role": "user", "content": "and?"}]
        turns = await served.recorded(4)
        assert [turn.carried for turn in turns] == [0, 1, 2, 3]
        behind = b"<user>and?"
        for before, after in itertools.pairwise(turns):
            size = len(before.tokens)
            assert after.tokens.tolist()[:size] == before.tokens.tolist()
            assert after.tokens.tolist()[size : size + len(behind) + 1] == [*behind, BYTE_EOS]


def looks() -> Looking:
    return Looking(seed=1, num_vocabulary=128, max_model_len=64)


def issued(name: str, *images: Image) -> Task:
    return Task(
        id=name,
        messages=(Message(role="user", content="count", images=images),),
        answer="1",
        issued=Issued(group=f"{name}.0", attempt=0, num_episodes=2, max_tokens=3),
    )


async def explore(
    store: MemoryStore, tasks: list[Task], engine: ScriptedEngine
) -> tuple[TopicArrivals, TopicArrivals, Metrics]:
    from actors.rollout.explorer import run_explorer

    log: Log = await memory_log(store=store)
    metrics = Metrics("explore")
    raw, verified = TopicArrivals(log, EXPERIENCES), TopicArrivals(log, VERIFIED)
    role = role_of("explore", FLOOR, log, store, metrics=metrics)
    explorer = run_explorer(role, EXPLORE, engine, CharTokenizer(), (EOS,))
    roles = [asyncio.create_task(loop) for loop in (explorer, raw.listen(), verified.listen())]
    async with running(*roles):
        await log.publish_all(TASKS, tasks)
        await until(lambda: len(raw.experiences) + len(verified.of(DropMarker)) >= 2 * len(tasks))
    return raw, verified, metrics


def test_the_engine_is_shown_the_pixels_and_the_experience_keeps_the_references() -> None:
    store, engine = MemoryStore(), looks()
    found = drawings(2)
    for item in found:
        deposit_image(store, item.image, item.picture)
    raw, _, _ = asyncio.run(explore(store, [issued("two", *(entry.image for entry in found))], engine))
    assert len(engine.seen) == 2 and all(len(images) == 2 for images in engine.seen)
    first, second = engine.seen[0]
    assert first.shape == second.shape == (16, 16, 3) and not np.array_equal(first, second)
    for experience in raw.experiences:
        assert [image.sha256 for image in experience.messages[0].images] == [entry.image.sha256 for entry in found]


def test_an_image_that_cannot_be_shown_fails_its_own_episodes_by_name_and_is_counted() -> None:
    store = MemoryStore()
    good, gone = drawings(2)
    deposit_image(store, good.image, good.picture)
    tasks = [issued("good", good.image), issued("gone", gone.image)]
    raw, verified, metrics = asyncio.run(explore(store, tasks, looks()))
    assert {experience.group for experience in raw.experiences} == {"good.0"} and len(raw.experiences) == 2
    assert [stub.group for stub in verified.of(DropMarker)] == ["gone.0"] * 2
    counted = {name: value for name, value in metrics.counters().items() if "bad_images" in name}
    assert sum(counted.values()) == 2 and any(MISSING in name for name in counted)
