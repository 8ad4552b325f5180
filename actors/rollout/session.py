"""The session: what a workflow talks to. It records every sampled token, logprob and version of one episode.

    session = Session(engine, tokenizer, Sampling(max_tokens=64, stop=tokenizer.eos_ids))
    reply = await session.reply(messages)                    # Message(role="assistant", ...); call it once per turn
    ...                                                      # messages += (reply, observation); reply again
    session.experiences(group=issued.group, attempt=issued.attempt, episode=7, group_size=16, sequence=412)

Guarantees: token-in token-out (the next turn's prompt is the exact earlier tokens, sampled ones included, plus what the
chat template adds after them; nothing sampled is ever tokenized again, also where the template or the agent leaves out what
was thought, or blanks); a hot reload in the middle begins a new span; a conversation that no longer extends what was sampled
(rewritten or branched history) begins a new part instead of inventing tokens, and `part_reason` says why; what was sampled
before an error is still returned.
"""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Lock
from typing import Protocol, TypedDict, Unpack

import msgspec

from actors.engines.engine import Completion, Engine, Sampling
from actors.rollout.continuation import MARK, SampledTurn, added_tokens, following_tokens, words
from actors.rollout.routing import RoutedTokens, Rows
from infra.store.images import ImageReader, Pixels, images_of
from schemas import End, Experience, Lane, Message, Score, Span, make_experience
from schemas.fields import Meta
from schemas.ids import experience_id

Conversation = tuple[Message, ...]

LONG_CHARS = 16_384
HISTORY_REWRITTEN = "history rewritten"
TEMPLATE_DIFFERS = "the template does not extend earlier turns"
_SHORT = (Message(role="user", content="?"), Message(role="assistant", content=MARK))


class ChatTokenizer(Protocol):
    """The part of `infra.model.model` tokenizers that a session needs."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the conversation under the chat template, ready for the next assistant turn."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens."""


class SessionHeader(TypedDict, total=False):
    """Header fields that the caller knows and the session does not; see `schemas.Experience`."""

    group_size: int
    lane: Lane
    origin: str
    tenant: str
    subject: str
    key_id: str
    sequence: int
    suite: str
    scores: tuple[Score, ...]
    priority: float
    task: str
    answer: str | None
    held_out: bool
    meta: Meta


class Session:
    """One episode's conversation with the policy. Not for concurrent use: one turn at a time."""

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, sampling: Sampling, images: ImageReader | None = None
    ) -> None:
        """images: reads what messages show; without one, a message with an image is an error."""
        self._images = images
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._parts: list[_Part] = []
        self._end: tuple[End, str] | None = None
        self._notes: Meta = {}

    @property
    def num_parts(self) -> int:
        """Token sequences so far; above 1 where a turn did not extend the earlier ones."""
        return len(self._parts)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far."""
        return sum(len(part.logprobs) for part in self._parts)

    @property
    def stopped(self) -> bool:
        """Whether the last turn ended by a stop token (False: by max_tokens, or there was none)."""
        return bool(self._parts) and self._parts[-1].stopped

    @property
    def routing(self) -> tuple[Rows | None, ...]:
        """The experts of each part's tokens but the last, [tokens, layers, k]; None where the engine records none."""
        return tuple(part.routed.all() for part in self._parts)

    async def reply(self, messages: Sequence[Message], *, sampling: Sampling | None = None) -> Message:
        """Sample the next assistant message of the whole conversation `messages`.

        sampling: for this turn only. Raises ValueError for an empty conversation, BadImage for an image that cannot be
        shown; errors of the engine and of the store pass through.
        """
        conversation = tuple(messages)
        if not conversation:
            raise ValueError("messages: got none, expected the conversation so far")
        rendered = await self._rendered(conversation)
        tail, reason = await self._tail(conversation, rendered)
        prompt = list(rendered) if tail is None else self._parts[-1].tokens + tail
        images = await self._shown(conversation)
        completion = await self._engine.generate(prompt, sampling or self._sampling, images=images)
        content = self._tokenizer.decode(completion.tokens[:-1] if completion.stopped else completion.tokens)
        reply = Message(role="assistant", content=content)
        if tail is None:
            self._parts.append(_Part(reason=reason))
        known = self._parts[-1].conversation  # its answers as they were sampled
        self._parts[-1].add(prompt, rendered, completion, (*known, *conversation[len(known) :], reply))
        return reply

    def score(self, name: str, value: float) -> None:
        """Record a verdict on the last turn, at its last token. Raises ValueError before the first turn."""
        if not self._parts:
            raise ValueError(f"score {name}: got no turn yet, expected one to judge")
        last = self._parts[-1]
        last.scores.append(Score(name=name, value=value, at=len(last.tokens) - 1))

    def note(self, name: str, value: int | float | str) -> None:
        """Record something worth knowing of the episode that is no verdict; it goes into `notes`."""
        self._notes = {**self._notes, name: value}

    def finish(self, end: End, reason: str = "") -> None:
        """Say how the episode ended, where the last turn's own end does not. reason: of a truncation."""
        self._end = (end, reason)

    def experiences(
        self, *, group: str, attempt: int, episode: int, failure: str = "", **header: Unpack[SessionHeader]
    ) -> list[Experience]:
        """What was recorded, as the parts of one episode, the last flagged.

        failure: why the episode failed; recorded, and every part's `end` is "failed". Otherwise `end` is what
        `finish` said, or "terminal", or "truncated" where the last turn ran into max_tokens. Verdicts on the whole
        (`scores`) go to the last part. A session that sampled nothing gives one empty experience, so that its group can
        still complete.
        """
        own: End = "terminal" if self.stopped or not self._parts else "truncated"
        failed: tuple[End, str] | None = ("failed", "") if failure else None
        end, reason = failed or self._end or (own, "")
        parts = self._parts or [_Part()]
        whole = header.get("scores", ())
        fields: SessionHeader = {"group_size": 1, **header}
        return [
            make_experience(
                tokens=part.tokens,
                logprobs=part.logprobs,
                messages=part.conversation,
                id=experience_id(group, attempt, episode, index),
                group=group,
                attempt=attempt,
                episode=episode,
                part=index,
                last=index == len(parts) - 1,
                end=end,
                failure=failure,
                truncated=reason,
                part_reason=part.reason,
                notes=self._notes,
                spans=tuple(part.spans),
                **_header(fields, part, scores=whole if index == len(parts) - 1 else ()),
            )
            for index, part in enumerate(parts)
        ]

    async def _rendered(self, conversation: Conversation) -> list[int]:
        """The conversation's tokens; a long one leaves the event loop, and with it the heartbeat, to others meanwhile."""
        if is_long(conversation):
            return await asyncio.to_thread(self._tokenizer.encode_chat, conversation)
        return self._tokenizer.encode_chat(conversation)

    async def _shown(self, conversation: Conversation) -> tuple[Pixels, ...]:
        """The pixels of the conversation's images, which are recorded by reference alone."""
        images = images_of(conversation)
        if not images:
            return ()
        if self._images is None:
            raise ValueError(f"messages: got {len(images)} images, expected none: this session reads no store")
        return await asyncio.to_thread(self._images.read_all, images)

    async def _tail(self, conversation: Conversation, rendered: Sequence[int]) -> tuple[list[int] | None, str]:
        """Observation tokens that continue the last part; None where a new part begins, and why it does."""
        if not self._parts:
            return None, ""
        last = self._parts[-1]
        known = len(last.conversation)
        if len(conversation) <= known or not _same(conversation[:known], last.conversation):
            return None, HISTORY_REWRITTEN
        turn = SampledTurn(last.rendered, last.turn, last.conversation[-1].content, last.stopped)
        tail = added_tokens(rendered, turn, self._tokenizer)
        if tail is None:
            tail = await self._following(conversation[known:], turn)
        return tail, TEMPLATE_DIFFERS if tail is None else ""

    async def _following(self, new: Conversation, turn: SampledTurn) -> list[int] | None:
        """Observation tokens where the template writes the last answer otherwise than it was sampled."""

        def found() -> list[int] | None:
            return following_tokens(
                self._tokenizer.encode_chat,
                _SHORT,
                new,
                turn,
                stops=self._sampling.stop,
                decode=self._tokenizer.decode,
            )

        return await asyncio.to_thread(found) if is_long(new) else found()


def _same(given: Conversation, known: Conversation) -> bool:
    """Whether it is the same conversation: answers may come back without what was thought, and without blanks around them."""
    return all(
        one == other or (one.role == other.role == "assistant" and words(one.content) == words(other.content))
        for one, other in zip(given, known, strict=True)
    )


def is_long(messages: Sequence[Message]) -> bool:
    """Whether there is more text than an event loop may wait for."""
    return sum(len(message.content) for message in messages) > LONG_CHARS


class CachedTokenizer:
    """A tokenizer that remembers what it rendered last: the episodes of a group share their prompt, and short games
    take the same turns again and again. Safe in several threads, which render a long conversation once between them.

    max_tokens: of the conversations remembered, all together; more than that of one alone is remembered too.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, max_tokens: int = 262_144) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._rendered: dict[Conversation, list[int]] = {}
        self._long, self._cache = Lock(), Lock()

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """As the wrapped tokenizer's; callers must not change the list."""
        key = tuple(messages)
        with self._long if is_long(key) else nullcontext():
            tokens = self._rendered.get(key)
            if tokens is None:
                tokens = list(self._tokenizer.encode_chat(messages))
                self._remember(key, tokens)
        return tokens

    def _remember(self, key: Conversation, tokens: list[int]) -> None:
        with self._cache:
            self._num_tokens += len(tokens) - len(self._rendered.pop(key, ()))
            while self._rendered and self._num_tokens > self._max_tokens:
                self._num_tokens -= len(self._rendered.pop(next(iter(self._rendered))))
            self._rendered[key] = tokens

    def decode(self, ids: Sequence[int]) -> str:
        """As the wrapped tokenizer's."""
        return self._tokenizer.decode(ids)


class _Part(msgspec.Struct):
    """One token sequence being grown.

    rendered: the template's own tokens for the last turn's prompt. turn: what the last turn sampled. reason: why it does
    not go on in the part before.
    """

    tokens: list[int] = []
    rendered: Sequence[int] = ()
    turn: tuple[int, ...] = ()
    logprobs: list[float] = []
    spans: list[Span] = []
    conversation: Conversation = ()
    stopped: bool = False
    scores: list[Score] = []
    reason: str = ""
    routed: RoutedTokens = msgspec.field(default_factory=RoutedTokens)

    def add(
        self, prompt: list[int], rendered: Sequence[int], completion: Completion, conversation: Conversation
    ) -> None:
        start = len(prompt)
        for span in completion.spans:
            self.spans.append(msgspec.structs.replace(span, start=start + span.start, stop=start + span.stop))
        self.tokens = [*prompt, *completion.tokens]
        self.logprobs.extend(completion.logprobs)
        self.routed.add(completion.routing)
        self.rendered, self.turn = rendered, completion.tokens
        self.conversation, self.stopped = conversation, completion.stopped


def _header(fields: SessionHeader, part: _Part, *, scores: tuple[Score, ...]) -> SessionHeader:
    """Header fields of one part, which has verdicts of its own."""
    return {**fields, "scores": (*part.scores, *scores)}
