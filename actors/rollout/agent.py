"""The agent: chooses what is done next, by asking the policy, and says which of it the environment gets to see.

An agent is named by `use`; its options are the fields of a struct. It holds nothing between turns: the conversation is
all there is.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from actors.rollout.session import Session
from schemas import Message


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. reply: the policy's own message. action: what the environment gets; None where the reply held none.
    complaint: the observation that the policy gets then.

    Example: Act(reply=Message(role="assistant", content="8"), action="8")
    """

    reply: Message
    action: str | None
    complaint: str = ""


class Agent(Protocol):
    """How a policy plays."""

    def opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation before the first turn, from the task's own messages."""

    async def act(self, session: Session, conversation: Sequence[Message]) -> Act:
        """Ask `session` for the next message and read the action out of it."""
