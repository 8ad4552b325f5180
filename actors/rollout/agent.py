"""Agents: request the next message from the policy and choose the part of it that the environment gets.

`use` names an agent; its options are the fields of a struct. It keeps no state between turns except the conversation.
"""

import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from actors.rollout.session import Session
from infra.settings.config import Section
from schemas import Message

SYSTEM = """\
Solve the task step by step. In every turn write what you think, then what you do:
Thought: what you know and what you want to find out
Action: one action
Then wait for the observation."""
COMPLAINT = 'No action was found: end the turn with one line "Action: ...".'
_ACTION = re.compile(r"^[ \t]*+Action:[ \t]*+(\S.*+)$", re.MULTILINE)


class Act(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of an agent. reply: message of the policy. action: action for the environment, None if the reply has none.
    complaint: observation for the policy in that case.

    Example: Act(reply=Message(role="assistant", content="8"), action="8")
    """

    reply: Message
    action: str | None
    complaint: str = ""


class Agent(Protocol):
    """Chooses actions by requesting replies from the policy."""

    def opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return the conversation before the first turn, from the task's messages."""

    async def act(self, session: Session, conversation: Sequence[Message]) -> Act:
        """Request the next message from `session` and extract the action."""


class Chat(Section, frozen=True):
    """Agent whose whole reply is the action. system: System message before the messages of every task. "" for none.

    Example: Chat(system="Answer with one number.")
    """

    system: str = ""

    def opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return (*([Message(role="system", content=self.system)] if self.system else []), *messages)

    async def act(self, session: Session, conversation: Sequence[Message]) -> Act:
        """One reply, blanks around it taken off."""
        reply = await session.reply(conversation)
        return Act(reply=reply, action=reply.content.strip())


class React(Section, frozen=True):
    """Agent that reasons, then acts; only the action reaches the environment (ReAct, arXiv 2210.03629, section 2).

    system: System message with the instruction to reason and act. complaint: Observation after a turn without an action.

    Example: React()
    """

    system: str = SYSTEM
    complaint: str = COMPLAINT

    def opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return (Message(role="system", content=self.system), *messages)

    async def act(self, session: Session, conversation: Sequence[Message]) -> Act:
        """One reply; its last line "Action: …" is the action."""
        reply = await session.reply(conversation)
        found = _ACTION.findall(reply.content)
        return Act(reply=reply, action=found[-1].rstrip(" \t") if found else None, complaint=self.complaint)
