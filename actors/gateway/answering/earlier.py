"""Conversations by the id of their last answer, for clients that send only what is new. In memory, per gateway, bounded.

A request that names an answer which is not known here (another gateway gave it, it was forgotten, it belongs to another
tenant) is refused with that reason, and its client sends the whole conversation.
"""

from collections import OrderedDict

import msgspec

from actors.gateway.answering.conversation import ChatMessage

_OBJECTS_BYTES = 512  # of the objects that hold a message, about


class Conversation(msgspec.Struct, frozen=True):
    """What was said up to an answer. tenant: of the key that asked. session: as the client, or the gateway, calls it.
    messages: the answer last.
    """

    tenant: str
    session: str
    messages: tuple[ChatMessage, ...]

    @property
    def num_bytes(self) -> int:
        """What it takes of memory, about. Answers of one conversation share their messages; each counts all of them."""
        return sum(_OBJECTS_BYTES + len(msgspec.json.encode(message)) for message in self.messages)


class Earlier:
    """The newest conversations. limit: how many. max_bytes: of them together."""

    def __init__(self, limit: int, max_bytes: int) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, tuple[Conversation, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def find(self, answer: str, tenant: str) -> Conversation | None:
        """The conversation that ends with an answer, if the tenant was given it."""
        found = self._held.get(answer)
        return found[0] if found is not None and found[0].tenant == tenant else None

    def keep(self, answer: str, conversation: Conversation) -> None:
        """Remember a conversation under the id of its answer; the oldest are forgotten."""
        size = conversation.num_bytes
        self._held[answer] = (conversation, size)
        self.num_bytes += size
        while self._held and (len(self._held) > self._limit or self.num_bytes > self._max_bytes):
            _, (_, gone) = self._held.popitem(last=False)
            self.num_bytes -= gone
