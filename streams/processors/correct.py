"""Turns an answer that a user edited into a demonstration and a preference pair, the edit preferred to the answer.

Guarantees: the prompt is the answer's own, token for token, and the policy's tokenizer encodes the edit. A retry gives the same
ids; a new revision exists only if the edit changed, so it replaces copies that were not drawn yet. Withdrawing an edit
withdraws both. Tenant, subject and key are the answer's.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from infra.chain.processor import processor
from infra.chain.redact import Kind, Redactor
from schemas import Experience, Message, Span
from schemas.errors import ConfigError
from schemas.experience import CHOSEN, REJECTED, Side, withdrawal_of
from schemas.fields import Lane
from streams.processors.episodes import derive
from streams.spelling import Speller, TokenizerFile

VERSION = 1
PROCESSOR = f"correct@{VERSION}"
ORIGIN = "correct"
DEMONSTRATION, PREFERENCE = 0, 1  # which of the two that an answer leads to


@processor(version=VERSION, of="group", inline=True)
class Correct:
    """Makes a demonstration in the expert lane and a pair in the human lane of each edited answer."""

    def __init__(
        self,
        *,
        model: str = "",
        kinds: Sequence[Kind] = (),
        patterns: Mapping[str, str] | None = None,
        speller: Speller | None = None,
    ) -> None:
        """model: folder or name of the policy's model, for its tokenizer. kinds, patterns: masked in edits before they are
        spelled, for the sources that no gateway redacts. Raises ConfigError where there is no tokenizer.
        """
        if speller is None and not model:
            raise ConfigError("collect.correct: needs policy.model, to tokenize corrections")
        self._speller = speller or TokenizerFile(model)
        self._redactor = Redactor(kinds, patterns)

    def __call__(self, group: tuple[Experience, ...]) -> tuple[Experience, ...]:
        if not any(member.edit for member in group):
            return group
        made = [new for member in group for new in self._made(member)]
        answers = (member if member.edit is None else msgspec.structs.replace(member, edit=None) for member in group)
        return (*answers, *made)

    def _made(self, answer: Experience) -> list[Experience]:
        if answer.edit is None:
            return []
        edit, edits = answer.edit.text, answer.edit.count
        if edit is None:
            gone = (_named(answer, DEMONSTRATION, "expert"), _named(answer, PREFERENCE, "human"))
            # At the first revision nothing was made yet that could be taken back.
            return [withdrawal_of(old, lane=old.lane, revision=edits - 1) for old in gone if answer.revision > 0]
        edit, _ = self._redactor.mask(edit)
        prompt = answer.tokens[: answer_start(answer)].tolist()
        chosen = [*prompt, *self._speller.encode(edit), self._speller.end]
        messages = (*answer.messages[:-1], Message(role="assistant", content=edit))
        made = [_side(_named(answer, DEMONSTRATION, "expert"), chosen, messages, edits, "demonstration")]
        rejected = answer.tokens.tolist()
        if chosen != rejected:
            better, worse = (_named(answer, PREFERENCE, "human", episode) for episode in (0, 1))
            made.append(_side(better, chosen, messages, edits, CHOSEN))
            made.append(_side(worse, rejected, answer.messages, edits, REJECTED))
        return made


def answer_start(answer: Experience) -> int:
    """Return the index at which the last answer begins: a new policy begins a new span within an answer, a new turn leaves
    a gap.
    """
    spans = answer.spans
    index = len(spans) - 1
    while index > 0 and spans[index - 1].stop == spans[index].start:
        index -= 1
    return spans[index].start if spans else answer.num_tokens


def _side(
    named: Experience,
    tokens: Sequence[int],
    messages: Sequence[Message],
    edits: int,
    kind: Side | Literal["demonstration"],
) -> Experience:
    start = answer_start(named)
    made = named.with_bulk(
        tokens=tokens,
        logprobs=[0.0] * (len(tokens) - start),
        messages=messages,
        spans=(Span(start=start, stop=len(tokens), version=-1, ratio=False),),
    )
    return msgspec.structs.replace(made, revision=edits - 1, kind=kind)


def _named(answer: Experience, index: int, lane: Lane, episode: int = 0) -> Experience:
    return derive(
        answer, PROCESSOR, index, episode=episode, group_size=2 if index == PREFERENCE else 1, part=0, last=True, lane=lane,
        origin=ORIGIN, end="terminal", scores=(), reward=None, stamps=(), truncated="", part_reason="", edit=None,
    )  # fmt: skip
