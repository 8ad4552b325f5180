"""What a team would write instead of verify and collect: one record an answer, and the work of the processors by hand.

The answers that come out are those that headrace lets out, with the same numbers; of what headrace promises besides (order,
replay, redelivery, late and missing members) there is nothing here.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from streams.processors.filter import MIN_LOOP_TOKENS, repetition

MAX_REPETITION = 0.9
REMEMBERED = 65_536
MIN_PRIORITY = 0.1
EPSILON = 1e-4
StageName = Literal["verify", "collect"]


class PlainAnswer(msgspec.Struct):
    """One answer as msgspec has it.

    id, group, episode, group_size, num_prompt, messages, answer, reward, advantage, priority: as in an experience.
    tokens, logprobs: lists, or the bytes of arrays of uint32 and float32. version: of the policy. score: the only one.
    reason: why it was dropped, "" for kept.
    """

    id: str
    group: str
    episode: int
    group_size: int
    num_prompt: int
    tokens: Any
    logprobs: Any
    messages: list[dict[str, str]]
    answer: str
    version: int
    score: float | None = None
    reward: float | None = None
    advantage: float | None = None
    priority: float = 1.0
    reason: str = ""


class WireForm(NamedTuple):
    """How an answer becomes bytes, and bytes an answer."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


class ListedAnswer(PlainAnswer):
    """As plain lists. tokens, logprobs: of prompt and answer."""

    tokens: list[int]
    logprobs: list[float]


class PackedAnswer(PlainAnswer):
    """As the bytes of arrays. tokens, logprobs: of prompt and answer."""

    tokens: bytes
    logprobs: bytes


_encoder = msgspec.msgpack.Encoder()
FORMS = {
    "lists": WireForm(_encoder.encode, msgspec.msgpack.Decoder(ListedAnswer).decode),
    "packed": WireForm(_encoder.encode, msgspec.msgpack.Decoder(PackedAnswer).decode),
    "json": WireForm(msgspec.json.Encoder().encode, msgspec.json.Decoder(ListedAnswer).decode),
}


class PlainVerify:
    """Validate, dedupe, filter, score."""

    def __init__(self) -> None:
        self._seen: dict[str, None] = {}

    def take(self, one: Any) -> list[Any]:
        """The answer with its score, or what is left of a dropped one with the reason; an empty list for a duplicate."""
        if one.id in self._seen:
            return []
        self._seen[one.id] = None
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        one.reason = _fault(one)
        if one.reason:
            one.tokens, one.logprobs, one.messages = type(one.tokens)(), type(one.logprobs)(), []
        else:
            one.score = float(one.messages[-1]["content"].strip() == one.answer.strip())
        return [one]


def _fault(one: Any) -> str:
    """Why an answer is not trained on."""
    tokens, logprobs = values(one)
    sampled = tokens[one.num_prompt :]
    if len(logprobs) != len(sampled) or not (np.max(logprobs) <= 0 and np.min(logprobs) > -np.inf):
        return "bad frame"
    if len(sampled) >= MIN_LOOP_TOKENS and repetition(sampled) > MAX_REPETITION:
        return "repetition"
    return ""


def values(one: Any) -> tuple[Any, Any]:
    """Tokens and logprobs as arrays."""
    if isinstance(one.tokens, bytes):
        return np.frombuffer(one.tokens, np.uint32), np.frombuffer(one.logprobs, np.float32)
    return np.array(one.tokens, np.uint32), np.array(one.logprobs, np.float32)


class PlainCollect:
    """Answers wait in memory for the others of their group; then reward, advantage and priority."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[int, Any]] = {}

    def take(self, one: Any) -> list[Any]:
        """The group, once all of it is there; nothing of one whose rewards are all equal."""
        group = self._groups.setdefault(one.group, {})
        group[one.episode] = one
        if len(group) < one.group_size:
            return []
        del self._groups[one.group]
        members = [group[episode] for episode in sorted(group)]
        rewards = [member.score for member in members]
        if max(rewards) == min(rewards):
            return []
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        for member in members:
            member.reward = member.score
            member.advantage = (member.score - mean) / (std + EPSILON)
            member.priority = min(1.0, max(MIN_PRIORITY, 2 * std))
        return members


def stage_of(name: StageName) -> PlainVerify | PlainCollect:
    """The work of a stage."""
    return PlainVerify() if name == "verify" else PlainCollect()
