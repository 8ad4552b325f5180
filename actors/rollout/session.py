"""The session: a workflow samples turns through it. It records every sampled token, logprob and version of one episode.

    session = Session(engine, tokenizer, Sampling(max_tokens=64, stop=tokenizer.eos_ids))
    reply = await session.reply(messages)                    # Message(role="assistant", ...); call it once per turn
    ...                                                      # messages += (reply, observation); reply again
    session.experiences(group=issued.group, attempt=issued.attempt, episode=7, group_size=16, sequence=412)

Guarantees: token-in token-out (the next turn's prompt is the exact earlier tokens, sampled tokens included, plus the tokens
that the chat template adds after them; sampled tokens are never tokenized again, even if the template or the agent leaves out
thoughts or blanks); a hot reload in the middle begins a new span; a conversation that no longer extends the sampled turns
(rewritten or branched history) begins a new part instead of inventing tokens, and `part_reason` says why; turns sampled before
an error are still returned.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from actors.engines.engine import Engine, Sampling
from actors.rollout.continuation import MARK, SampledTurn, following_tokens
from actors.rollout.parts import Conversation, Follow, GrowingPart, Parts
from infra.store.images import ImageReader, Pixels, images_of
from schemas import Experience, Message, Score, make_experience
from schemas.fields import End, Meta
from schemas.ids import experience_id

LONG_CHARS = 16_384
T = TypeVar("T")
_SHORT = (Message(role="user", content="?"), Message(role="assistant", content=MARK))


class ChatTokenizer(Protocol):
    """The part of `infra.model.model` tokenizers that a session needs."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the conversation under the chat template, ready for the next assistant turn."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens."""


class Session:
    """One episode's conversation with the policy. Not for concurrent use: one turn at a time."""

    def __init__(
        self, engine: Engine, tokenizer: ChatTokenizer, sampling: Sampling, images: ImageReader | None = None
    ) -> None:
        """images: reads the images of messages; without it, a message with an image is an error. sampling: default of every
        turn.
        """
        self.images = images
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = sampling
        self.parts = Parts(tokenizer)
        self._end: tuple[End, str] | None = None
        self._notes: Meta = {}

    @property
    def num_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(part.logprobs) for part in self.parts.all)

    @property
    def stopped(self) -> bool:
        """True if the last turn ended with a stop token, False at max_tokens or without a turn."""
        return self.parts.last is not None and self.parts.last.stopped

    async def reply(self, messages: Sequence[Message], *, sampling: Sampling | None = None) -> Message:
        """Sample the next assistant message of the whole conversation `messages`.

        sampling: for this turn only. Raises ValueError for an empty conversation, BadImage for an image that cannot be
        shown; errors of the engine and of the store pass through.
        """
        conversation = tuple(messages)
        if not conversation:
            raise ValueError("messages: got none, expected the conversation so far")
        is_long = sum(len(message.content) for message in conversation) > LONG_CHARS
        rendered = await apart(is_long, self.tokenizer.encode_chat, conversation)
        part, prompt, reason = await apart(is_long, self.parts.find, conversation, rendered, self._follow(conversation))
        images = await self._shown(conversation)
        completion = await self.engine.generate(prompt, sampling or self.sampling, images=images)
        content = self.tokenizer.decode(completion.tokens[:-1] if completion.stopped else completion.tokens)
        reply = Message(role="assistant", content=content)
        part = part or self.parts.begin(reason)
        known = part.conversation  # its answers as they were sampled
        part.add(prompt, rendered, completion, (*known, *conversation[len(known) :], reply))
        self.parts.last = part
        return reply

    def score(self, name: str, value: float) -> None:
        """Record a verdict on the last turn, at its last token. Raises ValueError before the first turn."""
        last = self.parts.last
        if last is None:
            raise ValueError(f"score {name}: got no turn, expected at least one")
        last.scores.append(Score(name=name, value=value, at=len(last.tokens) - 1))

    def note(self, name: str, value: int | float | str) -> None:
        """Record a note on the episode in `notes`; notes are no scores."""
        self._notes = {**self._notes, name: encodable(value) if isinstance(value, str) else value}

    def finish(self, end: End, reason: str = "") -> None:
        """Say how the episode ended, where the last turn's own end does not. reason: of a truncation."""
        self._end = (end, reason)

    def experiences(
        self, *, group: str, attempt: int, episode: int, failure: str = "", scores: Sequence[Score] = (), **header: Any
    ) -> list[Experience]:
        """Return the recorded parts of the episode; the last has `last` set."""
        own: End = "terminal" if self.stopped or not self.parts.all else "truncated"
        failed: tuple[End, str] | None = ("failed", "") if failure else None
        end, reason = failed or self._end or (own, "")
        parts = [part for part in self.parts.all if part.tokens] or [GrowingPart()]
        fields = {"group_size": 1, **header}
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
                scores=(*part.scores, *(scores if index == len(parts) - 1 else ())),
                **fields,
            )
            for index, part in enumerate(parts)
        ]

    async def _shown(self, conversation: Conversation) -> tuple[Pixels, ...]:
        images = images_of(conversation)
        if not images:
            return ()
        if self.images is None:
            raise ValueError(f"messages: got {len(images)} images, expected none: this session reads no store")
        return await asyncio.to_thread(self.images.read_all, images)

    def _follow(self, conversation: Conversation) -> Follow:
        def follow(turn: SampledTurn, known: int) -> list[int] | None:
            return following_tokens(
                self.tokenizer.encode_chat,
                _SHORT,
                conversation[known:],
                turn,
                stops=self.sampling.stop,
                decode=self.tokenizer.decode,
            )

        return follow


def encodable(text: str) -> str:
    """The text, with "?" for each half of a character: no record holds those, and the policy can write them as JSON."""
    return text.encode(errors="replace").decode()


async def apart(is_long: bool, work: Callable[..., T], *given: Any) -> T:
    """The result of `work`, from a thread where it takes longer than an event loop, and with it a heartbeat, may wait."""
    return await asyncio.to_thread(work, *given) if is_long else work(*given)
