"""Turns of one conversation: the tokens that a next turn continues. In memory, per gateway, bounded in number and in bytes.

A session holds the ends of its newest conversations: parallel calls, sub-agents and branches each continue from their own end.
The chat template renders unknown conversations again (another replica served it, it was evicted, its history was rewritten);
only the exact spelling of earlier turns is lost. Only digests of a conversation are kept, with and without consent.
"""

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from actors.gateway.answering.conversation import Prompt
from actors.rollout.continuation import MARK, SampledTurn, added_tokens, following_tokens, words
from actors.rollout.parts import OTHER, TEMPLATE_DIFFERS
from infra.model.model import Tokenizer
from infra.newest import Newest
from schemas import Message
from schemas.fields import HISTORY_REWRITTEN

TOKENS = "I"  # the type code of an array of them: 4 bytes each
BRANCHED = "goes on from an earlier turn"
MAX_ENDS = 8  # of conversations of one session
_OBJECTS_BYTES = 1024  # of the objects that hold a session, about
_DIGEST_BYTES = 72


class HeldSession(msgspec.Struct, frozen=True):
    """The end of a conversation after its last turn. tokens: of all turns. past: digests of its first message, of its
    first two, and so on, the answer last. number: of consecutive turns with exact tokens. turn: the last turn.
    """

    tokens: "array[int]"
    turn: SampledTurn
    past: tuple[bytes, ...]
    number: int

    @property
    def known(self) -> int:
        return len(self.past)

    @property
    def num_bytes(self) -> int:
        num_tokens = len(self.tokens) + len(self.turn.rendered) + len(self.turn.sampled)
        return 4 * num_tokens + sys.getsizeof(self.turn.content) + _DIGEST_BYTES * self.known + _OBJECTS_BYTES


class Continuation(NamedTuple):
    """The beginning of a turn. tokens: of its prompt. number: earlier turns whose exact tokens these continue. reason: why
    there are none, "" for the first turn of a session.
    """

    tokens: list[int]
    number: int
    reason: str


def held(tokens: Sequence[int], turn: SampledTurn, plain: Sequence[Message], number: int) -> HeldSession:
    """A conversation after a turn, packed. plain: the conversation, the answer last."""
    packed = msgspec.structs.replace(turn, rendered=array(TOKENS, turn.rendered), sampled=array(TOKENS, turn.sampled))
    return HeldSession(array(TOKENS, tokens), packed, tuple(_digests(plain)), number)


class Sessions:
    """The newest sessions. limit: how many. max_bytes: of them together."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self.held: Newest[str, tuple[HeldSession, ...]] = Newest(limit, max_size=max_bytes, size=_size)

    def prompt(self, group: str, prompt: Prompt, rendered: Sequence[int], tokenizer: Tokenizer) -> Continuation:
        """Continue a session with its next turn."""
        ends, said, reason = (self.held.get(group) or ()), _digests(prompt.plain), ""
        for held in reversed(ends):
            if len(said) <= held.known or said[held.known - 1] != held.past[-1]:
                continue
            added = added_tokens(rendered, held.turn, tokenizer)
            if added is None:
                added = behind_answer(prompt, held.turn, held.known, tokenizer)
            if added is not None:
                return Continuation([*held.tokens, *added], held.number, "")
            reason = TEMPLATE_DIFFERS
        return Continuation(list(rendered), 0, reason or _reason(ends, prompt.plain, said))

    def keep(self, group: str, held: HeldSession) -> None:
        """Remember a session after a turn, instead of the turn before; the sessions that were longest without one are
        forgotten.
        """
        others = [
            mine for mine in (self.held.get(group) or ()) if held.past[mine.known - 1 : mine.known] != mine.past[-1:]
        ]
        self.held.put(group, (*others[1 - MAX_ENDS :], held))


def behind_answer(prompt: Prompt, turn: SampledTurn, known: int, tokenizer: Tokenizer) -> list[int] | None:
    """Tokens that a template writes behind the last answer, if it spells the answer otherwise than it was sampled; None where
    the request of the earlier turn had other tools.

    known: number of messages before, the answer `turn` last.
    """
    if turn.tools != prompt.tools_digest:
        return None
    new = prompt.chat[known - len(prompt.plain) :]  # from the end: a system message for the tools is not in `plain`
    answer: Mapping[str, Any] = {**prompt.chat[-len(new) - 1], "content": MARK}
    return following_tokens(
        lambda conversation: tokenizer.encode_request(conversation, prompt.tools),
        ({"role": "user", "content": "?"}, answer),
        new,
        turn,
        stops=tokenizer.eos_ids,
        decode=tokenizer.decode,
    )


def _reason(ends: Sequence[HeldSession], plain: Sequence[Message], said: Sequence[bytes]) -> str:
    if not ends:
        return ""
    common = max(sum(mine == other for mine, other in zip(said, end.past, strict=False)) for end in ends)
    if any(message.role == "assistant" for message in plain[:common]):
        return BRANCHED
    return HISTORY_REWRITTEN if common else OTHER


def _size(ends: Sequence[HeldSession]) -> int:
    return sum(end.num_bytes for end in ends)


def _digests(plain: Sequence[Message]) -> list[bytes]:
    """Digests of the first message, of the first two, and so on: 32 bytes each; answers count by their words."""
    found, digests = hashlib.blake2b(digest_size=32), []
    for message in plain:
        said = words(message.content) if message.role == "assistant" else message.content
        for text in (message.role, said, *(image.sha256 for image in message.images)):
            data = text.encode("utf-8", "surrogatepass")
            found.update(len(data).to_bytes(8, "big") + data)
        digests.append(found.digest())
    return digests
