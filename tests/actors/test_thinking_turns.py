"""Turns in which the model thinks, under templates in the styles of well-known models: one sequence, spelled as sampled."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletionMessage

from actors.engines.engine import Completion, Sampling
from actors.rollout.session import Session
from infra.model.model import Tokenizer, load_tokenizer
from schemas import Message, Span
from tests.actors.gateway.gateway_rig import EOS, ByteTokenizer, engine, says, serving
from tests.actors.test_session import Answers, user
from tests.infra.chat_models import STYLES, build_chat_model

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
def test_twenty_turns_are_one_sequence_whatever_becomes_of_thoughts_and_blanks(
    tokenizers: dict[str, Tokenizer], style: str, agent: str
) -> None:
    tokenizer = tokenizers[style]
    end = tokenizer.eos_ids[0]
    sampled = [(*tokenizer.encode(thought(number)), end) for number in range(TURNS)]
    answers = [
        Completion(tokens=one, logprobs=(-1.0,) * len(one), spans=(Span(0, len(one), 0),), stopped=True)
        for one in sampled
    ]
    sampler = Answers(*answers)
    session = Session(sampler, tokenizer, Sampling(max_tokens=99, stop=tokenizer.eos_ids))

    async def talk() -> None:
        conversation = [user("begin")]
        for number in range(TURNS):
            reply = await session.reply(conversation)
            sent = msgspec.structs.replace(reply, content=AGENTS[agent](reply.content))
            conversation += [sent, user(f"and {number}?")]

    asyncio.run(talk())
    (experience,) = session.experiences(group="t.0", attempt=0, episode=0)
    assert experience.num_sampled == sum(map(len, sampled)), "each sampled token is in it once"
    for before, after, one in zip(sampler.prompts, sampler.prompts[1:], sampled, strict=False):
        assert after[: len(before) + len(one)] == before + one
    # Behind each answer stands what the template writes behind a plain one.
    plain = tokenizer.encode_chat([user("?"), Message(role="assistant", content="x"), user("and 3?")])
    behind = plain[plain.index(end, len(tokenizer.encode_chat([user("?")]))) + 1 :]
    assert list(sampler.prompts[4][len(sampler.prompts[3]) + len(sampled[3]) :]) == behind


class ForgetfulBytes(ByteTokenizer):
    """Its template leaves out what earlier answers thought."""

    def encode_request(self, conversation: Any, tools: Any = ()) -> list[int]:
        said = [{**one, "content": one["content"].split("</think>")[-1].lstrip("\n")} for one in conversation]
        return super().encode_request(said, tools)


def apart(answer: ChatCompletionMessage) -> dict[str, Any]:
    return answer.model_dump(exclude_none=True)


CLIENTS: dict[str, Callable[[ChatCompletionMessage], dict[str, Any]]] = {
    "as it came": apart,
    "by the older name": lambda one: {**apart(one), "reasoning": None, "reasoning_content": apart(one)["reasoning"]},
    "in the content": lambda one: {
        "role": "assistant",
        "content": f"<think>{apart(one)['reasoning']}</think>{one.content}",
    },
    "without blanks around": lambda one: {**apart(one), "content": (one.content or "").strip()},
    "without the thought": lambda one: {"role": "assistant", "content": one.content},
}


@pytest.mark.parametrize("agent", CLIENTS)
def test_through_the_gateway_too_the_turns_of_a_session_go_on_from_what_was_sampled(tmp_path: Path, agent: str) -> None:
    async def check() -> None:
        texts = [thought(number) for number in range(4)]
        async with serving(tmp_path, engine(says(*texts)), tokenizer=ForgetfulBytes()) as served:
            key = served.key()
            await served.keys_read()
            client = served.client(key).with_options(default_headers={"x-session-id": "s"})
            conversation: list[Any] = [{"role": "user", "content": "begin"}]
            for text in texts:
                answer = await client.chat.completions.create(model="m", messages=conversation)
                message = answer.choices[0].message
                assert f"<think>{apart(message)['reasoning']}</think>{message.content}" == text
                conversation += [CLIENTS[agent](message), {"role": "user", "content": "and?"}]
            turns = await served.recorded(4)
            assert [one.carried for one in turns] == [0, 1, 2, 3]
            behind = b"<user>and?"
            for before, after in itertools.pairwise(turns):
                size = len(before.tokens)
                assert after.tokens.tolist()[:size] == before.tokens.tolist()
                assert after.tokens.tolist()[size : size + len(behind) + 1] == [*behind, EOS]

    asyncio.run(check())
