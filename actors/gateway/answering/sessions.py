"""Turns of one conversation: the tokens a next turn goes on from. In memory, per gateway, bounded in number and in bytes.

A session that is not known here (another replica served it, it was forgotten, its history was rewritten) is rendered
anew by the chat template: nothing is lost but the exact spelling of earlier turns. Of the conversation itself a digest is
kept, whatever its key's consent.
"""

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from actors.gateway.answering.conversation import Prompt
from actors.rollout.continuation import MARK, Decoder, SampledTurn, added_tokens, following_tokens, words
from schemas import Message

TOKENS = "I"  # the type code of an array of them: 4 bytes each
_OBJECTS_BYTES = 1024  # of the objects that hold a session, about


class SessionTokenizer(Decoder, Protocol):
    """The part of a tokenizer that sessions need."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    def encode_request(
        self, conversation: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of a conversation as the template writes it, ready for the next answer."""


class HeldSession(msgspec.Struct, frozen=True):
    """A session after its last turn. tokens: all of it. known, digest: how many messages it has, the answer last, and what
    they say. number: of turns in a row whose tokens go on exactly.
    """

    tokens: "array[int]"
    turn: SampledTurn
    known: int
    digest: bytes
    number: int

    @property
    def num_bytes(self) -> int:
        """What it takes of memory, about."""
        num_tokens = len(self.tokens) + len(self.turn.rendered) + len(self.turn.sampled)
        return 4 * num_tokens + sys.getsizeof(self.turn.content) + _OBJECTS_BYTES


def held(tokens: Sequence[int], turn: SampledTurn, plain: Sequence[Message], number: int) -> HeldSession:
    """A session after a turn, packed. plain: the conversation, the answer last."""
    packed = msgspec.structs.replace(turn, rendered=array(TOKENS, turn.rendered), sampled=array(TOKENS, turn.sampled))
    return HeldSession(array(TOKENS, tokens), packed, len(plain), _digest(plain), number)


class Sessions:
    """The newest sessions. limit: how many. max_bytes: of them together."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, HeldSession] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def prompt(
        self, group: str, prompt: Prompt, rendered: Sequence[int], tokenizer: SessionTokenizer
    ) -> tuple[list[int], int]:
        """Prompt tokens of the next turn, and how many turns they go on from exactly."""
        held, plain = self._held.get(group), prompt.plain
        if held is not None and len(plain) > held.known and _digest(plain[: held.known]) == held.digest:
            added = added_tokens(rendered, held.turn, tokenizer)
            if added is None and prompt.chat is not None:
                added = behind_answer(prompt.chat, prompt.tools, held.turn, held.known, tokenizer)
            if added is not None:
                return [*held.tokens, *added], held.number
        return list(rendered), 0

    def keep(self, group: str, held: HeldSession) -> None:
        """Remember a session after a turn; those that were longest without one are forgotten."""
        self.forget(group)
        self._held[group] = held
        self.num_bytes += held.num_bytes
        while self._held and (len(self._held) > self._limit or self.num_bytes > self._max_bytes):
            self.forget(next(iter(self._held)))

    def forget(self, group: str) -> None:
        """The next turn is rendered anew."""
        gone = self._held.pop(group, None)
        self.num_bytes -= gone.num_bytes if gone is not None else 0


def behind_answer(
    chat: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    turn: SampledTurn,
    known: int,
    tokenizer: SessionTokenizer,
) -> list[int] | None:
    """What the template writes behind the last answer, where it writes the answer otherwise than it was sampled. known: so many
    messages, the answer `turn` last, were there before.
    """
    answer = {**chat[known - 1], "content": MARK}
    return following_tokens(
        lambda conversation: tokenizer.encode_request(conversation, tools),
        ({"role": "user", "content": "?"}, answer),
        chat[known:],
        turn,
        stops=tokenizer.eos_ids,
        decode=tokenizer.decode,
    )


def _digest(plain: Sequence[Message]) -> bytes:
    """What messages say, in 32 bytes; of answers, their words."""
    found = hashlib.blake2b(digest_size=32)
    for message in plain:
        said = words(message.content) if message.role == "assistant" else message.content
        for text in (message.role, said, *(image.sha256 for image in message.images)):
            data = text.encode("utf-8", "surrogatepass")
            found.update(len(data).to_bytes(8, "big") + data)
    return found.digest()
