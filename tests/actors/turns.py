"""Shared parts of the workflow tests: a chat template with turns, an engine that reloads while it talks, and episodes."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from actors.engines.engine import Completion, Sampling
from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.rollout.environment import Outcome
from actors.rollout.session import Session
from actors.rollout.workflow import Workflow
from infra.policies.policy import Policy
from infra.policies.tensors import from_numpy
from infra.store.images import Pixels
from schemas import Experience, Issued, Message, Task
from tests.actors.rig import EOS, CharTokenizer

SIZE = 128
SAMPLING = Sampling(max_tokens=200, stop=(EOS,))


class TurnTokenizer(CharTokenizer):
    """One token a character; what the assistant said ends with EOS. forgets: only the last observation is kept."""

    def __init__(self, *, forgets: bool = False) -> None:
        self._forgets = forgets

    def encode(self, text: str) -> list[int]:
        return [min(ord(character), SIZE - 1) for character in text]

    def encode_chat(self, messages: Iterable[Message]) -> list[int]:
        kept = list(messages)[-1:] if self._forgets else messages
        tokens: list[int] = []
        for message in kept:
            tokens += self.encode(message.content) + ([EOS] if message.role == "assistant" else [])
        return tokens


class Guess:
    """An environment that hides the number of the task's answer: after a wrong guess it says "higher" or "lower"."""

    def __init__(self, *, high: int, turns: int) -> None:
        self._left, self._secret = turns, 0

    async def reset(self, task: Task, *, seed: int) -> Outcome:
        self._secret = int(task.answer or 0)
        return Outcome()

    async def step(self, action: str) -> Outcome:
        self._left -= 1
        if int(action) == self._secret:
            return Outcome(reward=1.0, end="terminal")
        said = "higher" if int(action) < self._secret else "lower"
        return Outcome(observation=said, reward=0.0, end=None if self._left else "terminal")


class Talk:
    """The prompts and completions of an engine, in order."""

    def __init__(self) -> None:
        self.turns: list[tuple[tuple[int, ...], Completion]] = []


class RecordingEngine(ScriptedEngine):
    """Remembers every turn; `reloads`: swaps to the next version in the middle of each, and between them."""

    def __init__(self, says: Callable[[str], str], *, reloads: bool = False, max_model_len: int = 4096) -> None:
        def script(prompt: tuple[int, ...]) -> Sequence[int]:
            return [*CharTokenizer().encode(says(CharTokenizer().decode(prompt))), EOS]

        super().__init__(script=script, num_vocabulary=SIZE, max_model_len=max_model_len)
        self.talk = Talk()
        self.tables: dict[int, np.ndarray] = {}
        self._reloads = reloads

    async def generate(self, prompt: Sequence[int], sampling: Sampling, *, images: Sequence[Pixels] = ()) -> Completion:
        running = asyncio.ensure_future(super().generate(prompt, sampling, images=images))
        if self._reloads:
            for _ in range(3):  # the task starts, its sampling starts, a first token is sampled under the old weights
                await asyncio.sleep(0)
            await self.load(random_policy(self.version + 1))
        completion = await running
        self.talk.turns.append((tuple(prompt), completion))
        if self._reloads:
            await self.load(random_policy(self.version + 1))
        return completion


def random_policy(version: int) -> Policy:
    table = np.random.default_rng(version).normal(size=(SIZE, SIZE)).astype(np.float32)
    return Policy(version=version, tensors={TENSOR: from_numpy(table)})


def logprob(version: int, before: int, token: int) -> float:
    """Logprob of `token` after `before` under the weights of `random_policy(version)`."""
    row = np.random.default_rng(version).normal(size=(SIZE, SIZE)).astype(np.float32)[before].astype(np.float64)
    return float(row[token] - np.log(np.exp(row).sum()))


def issued(answer: str = "", *, content: str = "go ", **fields: object) -> Task:
    return Task(
        id="t",
        messages=(Message(role="user", content=content),),
        answer=answer,
        issued=Issued(group="t.0", attempt=0, num_episodes=2, max_tokens=200),
        **fields,  # type: ignore[arg-type]
    )


def play(
    workflow: Workflow, engine: ScriptedEngine, task: Task, tokenizer: CharTokenizer | None = None
) -> list[Experience]:
    """One episode's experiences; what the workflow raises is raised."""

    async def run() -> list[Experience]:
        await engine.start()
        session = Session(engine, tokenizer or TurnTokenizer(), SAMPLING)
        scores = tuple(await workflow(task, session))
        return session.experiences(group="t.0", attempt=0, episode=0, group_size=2, scores=scores)

    return asyncio.run(run())
