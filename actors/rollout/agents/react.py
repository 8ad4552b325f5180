"""react: the policy thinks, then acts; only the action reaches the environment (ReAct, arXiv 2210.03629, section 2)."""

import re
from collections.abc import Sequence

from actors.rollout.agent import Act
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


class React(Section, frozen=True):
    """system: the instruction to think and act. complaint: its observation where a turn has no action.

    Example: React()
    """

    system: str = SYSTEM
    complaint: str = COMPLAINT

    def opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The task's messages behind the system message."""
        return (Message(role="system", content=self.system), *messages)

    async def act(self, session: Session, conversation: Sequence[Message]) -> Act:
        """One reply; its last line "Action: …" is the action."""
        reply = await session.reply(conversation)
        found = _ACTION.findall(reply.content)
        return Act(reply=reply, action=found[-1].rstrip(" \t") if found else None, complaint=self.complaint)
