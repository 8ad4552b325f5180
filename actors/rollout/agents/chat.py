"""chat: everything the policy says is the action."""

from collections.abc import Sequence

from actors.rollout.agent import Act
from actors.rollout.session import Session
from infra.settings.config import Section
from schemas import Message


class Chat(Section, frozen=True):
    """system: put before the messages of every task, "" for nothing.

    Example: Chat(system="Answer with one number.")
    """

    system: str = ""

    def opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The task's messages behind the system message."""
        return (*([Message(role="system", content=self.system)] if self.system else []), *messages)

    async def act(self, session: Session, conversation: Sequence[Message]) -> Act:
        """One reply, blanks around it taken off."""
        reply = await session.reply(conversation)
        return Act(reply=reply, action=reply.content.strip())
