"""Workflow of a policy and an environment that take turns.

    reset ─> [session.reply] ─> action ─> step ─> reward at the turn's last token ─> observation ─> again

Ends: terminal (the environment's result), truncated (its limit, `max_turns`, or a full context; `truncated` has the cause),
failed (an exception; `failure` has it).
"""

from functools import cached_property

import msgspec

from actors.engines.engine import ContextFull
from actors.rollout.environment import Environment, EnvironmentFailed, GuardedEnvironment, world_seed
from actors.rollout.parts import Conversation
from actors.rollout.session import Session
from infra.chain.calls import Trouble
from infra.settings.config import Positive, Seconds, Section, Use
from infra.settings.plugin import load
from schemas import Message, Score, Task
from schemas.errors import ConfigError


class Interact(Section, frozen=True, dict=True):
    """Turns of the policy and an environment, until the environment ends the episode or `max_turns` is reached. An action is
    the whole reply, without blanks around it.

    environment: Plugin of the environment. system: System message before the messages of every task. "" for none. max_turns:
    Maximum turns of the policy. score: Name of the score with the environment's rewards. timeout_s: Maximum seconds of a reset
    or a step. observations: Role of the messages with observations.

    Example: Interact(environment=Use(use="actors.rollout.environments.reasoning_gym:ReasoningGym"), max_turns=4)
    """

    environment: Use
    system: str = ""
    max_turns: Positive = 8
    score: str = "environment"
    timeout_s: Seconds = 30.0
    observations: str = "user"

    def __post_init__(self) -> None:
        """Find the plugin at the start of the role rather than in its first episode. Raises ConfigError."""
        environment: Environment = load(self.environment.use, self.environment.options, "environment")
        if not callable(getattr(environment, "reset", None)) or not callable(getattr(environment, "step", None)):
            raise ConfigError(f"environment: {self.environment.use} has no reset and step; expected an Environment")

    async def __call__(self, task: Task, session: Session) -> tuple[Score, ...]:
        """Play one episode."""
        opening = (Message(role="system", content=self.system),) if self.system else ()
        async with GuardedEnvironment(
            self.environment.use, self.environment.options, timeout_s=self.timeout_s, trouble=self._trouble
        ) as world:
            outcome = await world.reset(task, seed=world_seed(task.issued.group if task.issued else task.id))
            if outcome.end is not None:
                raise EnvironmentFailed(f"environment {self.environment.use}: ended before the first turn")
            conversation = (*opening, *self._observed(task.messages, outcome.observation))
            for _ in range(self.max_turns):
                try:
                    reply = await session.reply(conversation)
                except ContextFull:
                    if not session.num_sampled:
                        raise
                    session.finish("truncated", "context is full")
                    return ()
                outcome = await world.step(reply.content.strip())
                if outcome.reward is not None:
                    session.score(self.score, outcome.reward)
                if outcome.end is not None:
                    session.finish(outcome.end, "environment" if outcome.end == "truncated" else "")
                    return ()
                conversation = self._observed((*conversation, reply), outcome.observation)
        session.finish("truncated", "max_turns")
        return ()

    @cached_property
    def _trouble(self) -> Trouble:
        return Trouble(f"environment {self.environment.use}")

    def _observed(self, conversation: Conversation, observation: str) -> Conversation:
        """The conversation with an observation; it joins a message of the same role, since few templates take two."""
        if not observation:
            return conversation
        last = conversation[-1] if conversation else None
        if last is not None and last.role == self.observations:
            joined = msgspec.structs.replace(last, content=f"{last.content}\n{observation}")
            return (*conversation[:-1], joined)
        return (*conversation, Message(role=self.observations, content=observation))
