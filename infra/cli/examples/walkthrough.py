"""A run on one page: the work of its roles, top to bottom, with a log in memory and no server.

    issue ─> sample ─> score ─> group ─> journal ─> step ─> publish ─> load and probe ─> issue …

Run it: `python infra/cli/examples/walkthrough.py`. It takes half a minute on one core. Left out, and found where each function
says: waiting, retries, crashes, the bound on the age of tokens, other lanes, feedback, evaluations, several of anything.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from headrace import (
    BATCHES,
    BUFFER,
    EXPERIENCES,
    POLICIES,
    TASKS,
    VERIFIED,
    Block,
    Context,
    Experience,
    Issued,
    LaneConfig,
    Log,
    LogMessage,
    MemoryBus,
    MemoryStore,
    Message,
    NewVersion,
    PolicyEvent,
    PolicyFetcher,
    Sampling,
    Session,
    Stamp,
    StreamsConfig,
    Task,
    Topic,
    TorchEngine,
    TrainerConfig,
    assemble,
    build_char_model,
    build_collect,
    load_tokenizer,
    make_candidate,
    make_step,
    new_memories,
    open_learner,
    pack,
    publish,
    run_chain,
    score,
)

TRAINER = TrainerConfig(lanes={"usual": LaneConfig(loss="dppo")}, learning_rate=3e-3)
GROUPS, EPISODES, MAX_TOKENS = 4, 8, 8


@score(version=1, inline=True)
def digits(experience: Experience) -> float:
    """Share of digits in the answer: a task that a model with random weights can learn."""
    return sum(character.isdigit() for character in experience.response) / MAX_TOKENS


class Reader:
    """Reads a topic on from where it stopped: everything between roles goes through the log."""

    def __init__(self, log: Log, topic: Topic) -> None:
        self.log, self.topic = log, topic
        self.next: dict[int, int] = {}

    async def arrived(self) -> AsyncIterator[LogMessage]:
        """The records that came since the last call."""
        begins, ends = await self.log.bounds(self.topic)
        starts, self.next = {**begins, **self.next}, ends
        async for message in self.log.scan(self.topic, starts, ends):
            yield message


class Walk:
    """One run: a log, a store, one of each role."""

    def __init__(self, folder: Path) -> None:
        model = str(build_char_model(folder / "model", seed=3))
        self.store = MemoryStore()
        self.log = Log(MemoryBus(), "walk", store=self.store)
        self.tasks, self.experiences = Reader(self.log, TASKS), Reader(self.log, EXPERIENCES)
        self.verified, self.buffer = Reader(self.log, VERIFIED), Reader(self.log, BUFFER)
        self.policies = Reader(self.log, POLICIES)
        self.engine, self.tokenizer = TorchEngine(model=model, seed=0), load_tokenizer(model)
        self.verify, self.collect = (make_step("digits", digits),), build_collect(StreamsConfig())
        self.memories = new_memories(self.collect)
        self.learner = open_learner(TRAINER, model)
        self.fetcher = PolicyFetcher(self.store, "main")
        self.published = self.learner.tensors()  # of the newest version: the next version is stored as changes to it

    async def issue(self, step: int) -> None:
        """The master asks for groups of answers to one prompt, in an order that the trainer will keep (actors/master)."""
        for index in range(GROUPS):
            sequence = step * GROUPS + index
            issued = Issued(
                group=f"sum-{index}.{step}", attempt=0, sequence=sequence, min_version=self.engine.version,
                num_episodes=EPISODES, max_tokens=MAX_TOKENS,
            )  # fmt: skip
            asked = (Message(role="user", content=f"{index}+{index}="),)
            await self.log.publish(TASKS, Task(id=f"sum-{index}", messages=asked, split="train", issued=issued))

    async def sample(self) -> None:
        """The explorer answers, and records each token with its log-probability and version (actors/rollout)."""
        async for message in self.tasks.arrived():
            task = message.value
            assert isinstance(task, Task) and task.issued is not None
            found: list[Experience] = []
            for episode in range(task.issued.num_episodes):
                sampling = Sampling(max_tokens=task.issued.max_tokens, stop=self.tokenizer.eos_ids)
                session = Session(self.engine, self.tokenizer, sampling)
                await session.reply(task.messages)
                found += session.experiences(
                    group=task.issued.group, attempt=0, episode=episode, group_size=EPISODES, task=task.id,
                    sequence=task.issued.sequence,
                )  # fmt: skip
            await self.log.publish(EXPERIENCES, Block(tuple(found)))

    async def score(self) -> None:
        """A stream worker passes each answer through the chain of stage verify: here one score (streams/stages/verify.py)."""
        async for message in self.experiences.arrived():
            assert isinstance(message.value, Block)
            outcome = await run_chain(self.verify, message.value.experiences, Context())
            await self.log.publish(VERIFIED, Block(outcome.kept))

    async def group(self) -> None:
        """A stream worker closes each whole group, with rewards and advantages (streams/collect)."""
        async for message in self.verified.arrived():
            assert isinstance(message.value, Block)
            outcome = await run_chain(self.collect, message.value.experiences, Context(memories=self.memories))
            if outcome.kept:  # a group whose answers are all as good teaches nothing
                await self.log.publish(BUFFER, Block(outcome.kept))

    async def train(self, step: int) -> float:
        """The trainer journals the batch, then makes the step (trainer/loop/step.py)."""
        drawn = [
            (make_candidate(message.offset, message.value, uses=0), message.value)
            async for message in self.buffer.arrived()
            if isinstance(message.value, Block)
        ]
        version = self.engine.version
        stamp = Stamp(run="walk", token=0, step=step, version=version, phase="train", seed=step, config_hash="")
        batch, items = assemble(stamp, drawn)
        await self.log.publish(BATCHES, batch)  # durable first: a replay makes the same step from this record
        packed = pack(items, max_tokens=TRAINER.max_tokens_per_microbatch, version=version, exact=True)
        stats = self.learner.step(packed, learning_rate=TRAINER.learning_rate, seed=batch.seed)
        mean = sum(item.experience.reward or 0.0 for item in items) / len(items)
        print(f"step {step}: {len(items)} answers, mean reward {mean:.3f}, gradient norm {stats.grad_norm:.3f}")
        return mean

    async def publish(self, step: int) -> None:
        """The trainer stores the new weights as a version, with a probe for engines that load it (infra/policies)."""
        tensors = self.learner.tensors()
        probe = self.learner.probe((tuple(self.tokenizer.encode("1+1=2")),))
        new = NewVersion(policy="main", token=0, version=step + 1, parent=step, step=step)
        event = publish(self.store, new, tensors, previous=self.published, probe=probe)
        await self.log.publish(POLICIES, event)
        self.published = tensors

    async def load(self) -> None:
        """The explorer follows: bytes checked by hash, read back from the engine, and probed (actors/engines/reload.py)."""
        async for message in self.policies.arrived():
            assert isinstance(message.value, PolicyEvent)
            report = await self.engine.load(self.fetcher.fetch(message.value))
            print(
                f"version {self.engine.version}: loaded in {report.pause_ms:.0f} ms, probe off by {report.probe_abs_max:.1e}"
            )


async def main(folder: Path, num_steps: int = 3) -> list[float]:
    """Mean rewards of the steps."""
    walk = Walk(folder)
    await walk.log.create_topics(partitions=1, keep_ms=-1)
    await walk.engine.start()
    means = []
    for step in range(num_steps):
        await walk.issue(step)
        await walk.sample()
        await walk.score()
        await walk.group()
        means.append(await walk.train(step))
        await walk.publish(step)
        await walk.load()
    await walk.engine.close()
    return means


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        asyncio.run(main(Path(place), num_steps=10))
