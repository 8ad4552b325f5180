"""Turns of one conversation: the tokens a next turn goes on from. Bounded, in memory, per gateway.

A session that is not known here (another replica served it, it was forgotten, its history was rewritten) is rendered
anew by the chat template: nothing is lost but the exact spelling of earlier turns.
"""

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from actors.continuation import Decoder, Turn, added_tokens
from schemas import Message


class Held(msgspec.Struct, frozen=True):
    """A session after its last turn. tokens: all of it. plain: the conversation, the answer last.

    number: of turns in a row whose tokens go on exactly.
    """

    tokens: Sequence[int]
    turn: Turn
    plain: tuple[Message, ...]
    number: int


class Sessions:
    """The newest sessions. limit: how many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: OrderedDict[str, Held] = OrderedDict()

    def prompt(
        self, group: str, plain: tuple[Message, ...], rendered: Sequence[int], tokenizer: Decoder
    ) -> tuple[list[int], int]:
        """Prompt tokens of the next turn, and how many turns they go on from exactly."""
        held = self._held.get(group)
        if held is not None:
            known = len(held.plain)
            if len(plain) > known and plain[:known] == held.plain:
                added = added_tokens(rendered, held.turn, tokenizer)
                if added is not None:
                    return [*held.tokens, *added], held.number
        return list(rendered), 0

    def keep(self, group: str, held: Held) -> None:
        """Remember a session after a turn; the one that was longest without one is forgotten."""
        self._held[group] = held
        self._held.move_to_end(group)
        if len(self._held) > self._limit:
            self._held.popitem(last=False)

    def forget(self, group: str) -> None:
        """The next turn is rendered anew."""
        self._held.pop(group, None)
