"""Workflow of an agent and an environment that take turns.

    reset ─> [agent: session.reply] ─> action ─> step ─> reward at the turn's last token ─> observation ─> again

Ends: terminal (the environment's result), truncated (its limit, `max_turns`, or a full context; `truncated` has the cause),
failed (an exception; `failure` has it).
"""

from typing import cast

import msgspec

from actors.engines.engine import ContextFull
from actors.rollout.agent import Agent
from actors.rollout.environment import Environment, EnvironmentFailed, GuardedEnvironment, world_seed
from actors.rollout.parts import Conversation
from actors.rollout.session import Session
from infra.settings.config import Positive, Seconds, Section, Use
from infra.settings.plugin import load
from schemas import Message, Score, Task
from schemas.errors import ConfigError

CHAT = Use(use="actors.rollout.agent:Chat")


class Interact(Section, frozen=True):
    """Turns of an agent and an environment, until the environment ends the episode or `max_turns` is reached.

    environment: Plugin of the environment. agent: Plugin of the agent. max_turns: Maximum turns of the agent. score: Name of
    the score with the environment's rewards. timeout_s: Maximum seconds of a reset or a step. observations: Role of the
    messages with observations.

    Example: Interact(environment=Use(use="actors.rollout.environments.guess:Guess"), max_turns=4)
    """

    environment: Use
    agent: Use = CHAT
    max_turns: Positive = 8
    score: str = "environment"
    timeout_s: Seconds = 30.0
    observations: str = "user"

    def __post_init__(self) -> None:
        """Find both plugins at the start of the role rather than in its first episode. Raises ConfigError."""
        self._agent()
        environment: Environment = load(self.environment.use, self.environment.options, "environment")
        if not callable(getattr(environment, "reset", None)) or not callable(getattr(environment, "step", None)):
            raise ConfigError(f"environment: {self.environment.use} has no reset and step; expected an Environment")

    async def __call__(self, task: Task, session: Session) -> tuple[Score, ...]:
        """Play one episode."""
        agent = self._agent()
        async with GuardedEnvironment(
            self.environment.use, self.environment.options, timeout_s=self.timeout_s
        ) as world:
            outcome = await world.reset(task, seed=world_seed(task.issued.group if task.issued else task.id))
            if outcome.end is not None:
                raise EnvironmentFailed(f"environment {self.environment.use}: ended before the first turn")
            conversation = agent.opening(self._observed(task.messages, outcome.observation))
            for _ in range(self.max_turns):
                try:
                    act = await agent.act(session, conversation)
                except ContextFull:
                    if not session.num_sampled:
                        raise
                    session.finish("truncated", "context is full")
                    return ()
                observation = act.complaint
                if act.action is not None:
                    outcome = await world.step(act.action)
                    if outcome.reward is not None:
                        session.score(self.score, outcome.reward)
                    if outcome.end is not None:
                        session.finish(outcome.end, "environment" if outcome.end == "truncated" else "")
                        return ()
                    observation = outcome.observation
                conversation = self._observed((*conversation, act.reply), observation)
        session.finish("truncated", "max_turns")
        return ()

    def _agent(self) -> Agent:
        return cast(Agent, load(self.agent.use, self.agent.options, "agent"))

    def _observed(self, conversation: Conversation, observation: str) -> Conversation:
        """The conversation with an observation; it joins a message of the same role, since few templates take two."""
        if not observation:
            return conversation
        last = conversation[-1] if conversation else None
        if last is not None and last.role == self.observations:
            joined = msgspec.structs.replace(last, content=f"{last.content}\n{observation}")
            return (*conversation[:-1], joined)
        return (*conversation, Message(role=self.observations, content=observation))
