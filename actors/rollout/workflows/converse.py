"""converse: one answer to the task's messages."""

from actors.rollout.session import Session
from schemas import Message, Score, Task


async def converse(task: Task, session: Session, *, system: str = "") -> tuple[Score, ...]:
    """Ask once. system: put before the messages of every task."""
    messages = (Message(role="system", content=system), *task.messages) if system else task.messages
    await session.reply(messages)
    return ()
