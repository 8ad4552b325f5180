"""What goes into a stage and what comes out of it, of headrace and of its peers: the same answers in every form."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from infra.cli.bench.common.texts import RawAnswer, samples
from infra.cli.bench.peers.plain import FORMS, ListedAnswer, PackedAnswer, PlainAnswer, StageName, values
from schemas import Block, DropMarker, Message, Score, Span, decode, encode, make_experience
from schemas.ids import experience_id

VERSION = 7
LOOPS_EVERY = 4  # groups of which the last answer repeats itself, where it is long enough to tell
LOOP = 4  # tokens that such an answer says again and again
MIN_LOOP = 64
DIGITS = 6  # to which numbers are compared


class ToSend(NamedTuple):
    """One record of an input."""

    key: bytes
    value: bytes


class HopOutcome(NamedTuple):
    """What became of one answer, whatever form it came in. content: tokens, logprobs and texts; None for a dropped one."""

    reason: str
    numbers: tuple[float | None, ...]
    content: tuple[bytes, bytes, tuple[tuple[str, str], ...]] | None


class GroupOfAnswers(NamedTuple):
    """One group before it has a form, with what each answer's reference is."""

    answers: Sequence[RawAnswer]
    references: Sequence[str]


def groups(count: int, shape: tuple[int, int, int]) -> list[GroupOfAnswers]:
    """So many groups of a shape (answers, tokens of the prompt, of an answer): every other answer is right."""
    found = []
    for number in range(count):
        answers = samples(*shape, seed=number)
        if number % LOOPS_EVERY == 0 and shape[2] >= MIN_LOOP:
            last = answers[-1]
            answers[-1] = msgspec.structs.replace(last, response=(last.response[:LOOP] * shape[2])[: shape[2]])
        references = [one.messages[-1].content if at % 2 == 0 else "no" for at, one in enumerate(answers)]
        found.append(GroupOfAnswers(answers, references))
    return found


def blocks(stage: StageName, found: Sequence[GroupOfAnswers], round: int) -> list[ToSend]:
    """The input of headrace's stage: a record a group. round: part of the ids, so that no answer came before."""
    return [_block(stage, group, f"r{round}g{number}.0") for number, group in enumerate(found)]


def _block(stage: StageName, group: GroupOfAnswers, name: str) -> ToSend:
    members = []
    for episode, (one, reference) in enumerate(zip(*group, strict=True)):
        start = len(one.prompt)
        judged = stage == "collect"
        members.append(
            make_experience(
                id=experience_id(name, 0, episode),
                group=name,
                episode=episode,
                group_size=len(group.answers),
                tokens=one.prompt + one.response,
                logprobs=one.logprobs,
                messages=one.messages,
                spans=(Span(start, start + len(one.response), VERSION),),
                answer=reference,
                scores=(Score("exact", _score(one, reference)),) if judged else (),
                stamps=("validate@1", "dedupe@1", "filter@1", "exact@1") if judged else (),
            )
        )
    return ToSend(name.encode(), encode(Block(tuple(members))))


def records(stage: StageName, form: str, found: Sequence[GroupOfAnswers], round: int) -> list[ToSend]:
    """The same input for a peer: a record an answer."""
    return [
        ToSend(plain.group.encode(), FORMS[form].encode(plain))
        for number, group in enumerate(found)
        for plain in _plain(stage, form, group, f"r{round}g{number}.0")
    ]


def _plain(stage: StageName, form: str, group: GroupOfAnswers, name: str) -> Iterable[PlainAnswer]:
    for episode, (one, reference) in enumerate(zip(*group, strict=True)):
        tokens = one.prompt + one.response
        kind: type[Any] = PackedAnswer if form == "packed" else ListedAnswer
        yield kind(
            id=experience_id(name, 0, episode),
            group=name,
            episode=episode,
            group_size=len(group.answers),
            num_prompt=len(one.prompt),
            tokens=np.array(tokens, np.uint32).tobytes() if form == "packed" else tokens,
            logprobs=np.array(one.logprobs, np.float32).tobytes() if form == "packed" else one.logprobs,
            messages=[{"role": message.role, "content": message.content} for message in one.messages],
            answer=reference,
            version=VERSION,
            score=_score(one, reference) if stage == "collect" else None,
        )


def _score(one: RawAnswer, reference: str) -> float:
    return float(one.messages[-1].content == reference)


def verdicts_of_block(value: bytes) -> dict[str, HopOutcome]:
    """What a record says that headrace's stage sent: by id of the answer."""
    record = decode(value)
    if isinstance(record, DropMarker):
        return {record.id: HopOutcome(record.reason, (), None)}
    if not isinstance(record, Block):
        return {}
    return {
        one.id: HopOutcome(
            "",
            _numbers(one.score("exact"), one.reward, one.advantage, one.priority),
            (one.tokens.tobytes(), one.logprobs.tobytes(), _texts(one.messages)),
        )
        for one in record.experiences
    }


def verdicts_of_record(form: str, value: bytes) -> dict[str, HopOutcome]:
    """What a record says that a peer sent."""
    one = FORMS[form].decode(value)
    if one.reason:
        return {one.id: HopOutcome(one.reason, (), None)}
    tokens, logprobs = values(one)
    texts = tuple((message["role"], message["content"]) for message in one.messages)
    numbers = _numbers(one.score, one.reward, one.advantage, one.priority)
    return {one.id: HopOutcome("", numbers, (tokens.tobytes(), logprobs.tobytes(), texts))}


def _numbers(*numbers: float | None) -> tuple[float | None, ...]:
    return tuple(None if number is None else round(number, DIGITS) for number in numbers)


def _texts(messages: Iterable[Message]) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.content) for message in messages)
