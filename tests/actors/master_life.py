"""A life of a master without a log: what it decides is stored in lists that stand for topics, beside what the others write."""

from random import Random

import numpy as np
from msgspec.structs import replace

from actors.config import CanaryConfig, EvalSuite, GateConfig, GateSuite, MasterConfig, PeopleConfig
from actors.master.evaluation import eval_group
from actors.master.master import take_in
from actors.master.plan import ATTEMPTS_PER_LEASE, NOTHING, Plan
from infra.log.bus import Record
from infra.log.log import LogMessage
from infra.observe.metrics import Metrics
from infra.settings.config import Pacing
from schemas import (
    Answered,
    Block,
    Closure,
    Control,
    Directive,
    Drawn,
    Experience,
    Issued,
    Message,
    PolicyEvent,
    Progress,
    Rating,
    Score,
    Task,
)
from schemas.fields import VERSION_PASSED
from schemas.topics import EVALS, POLICIES, PROGRESS, REPORTS, TASKS, TASKSET, Topic
from tests.schemas.record_samples import group_block

SUITES = ("dev", "production")
CONFIG = MasterConfig(
    num_episodes=2,
    evals=tuple(EvalSuite(suite=suite, every=2, tasks=2) for suite in SUITES),
    gate=GateConfig(
        suites={"dev": GateSuite(max_drop=0.6, alpha=0.4)},
        canary=CanaryConfig(max_duration="60s", watch="30s"),
        people=PeopleConfig(block="10s", rating_window="20s"),
    ),
)
PACING = Pacing(groups_per_step=2, max_staleness=2, steps_per_version=1, reissue_s=6.0)
METRICS = Metrics("test")
OVERTAKEN, TOKEN = 3, 7  # leases: of a master before, which did not notice, and of this one
BASE = group_block(num_members=1).experiences[0]


def new_plan(token: int = TOKEN) -> Plan:
    return Plan(CONFIG, PACING, policy="main", token=token)


class MasterLife:
    """Topics of one partition each, and a master that reads them as they are written."""

    def __init__(self) -> None:
        self.now_ms = 1_763_715_600_000
        self.topics: dict[str, list[LogMessage]] = {
            topic.name: [] for topic in (TASKSET, TASKS, POLICIES, EVALS, PROGRESS, REPORTS)
        }
        self.order: list[LogMessage] = []
        self.plan = new_plan()
        self.version = 0
        self.step = 0
        self.said: list[Closure] = []
        self.write(POLICIES, Directive(order="lease", owner="first"))
        for index in range(6):
            split = "train" if index < 4 else SUITES[index % 2]
            message = Message(role="user", content=f"{index}?")
            self.write(TASKSET, Task(id=f"t{index}", messages=(message,), answer="1", split=split))
            self.write(TASKSET, Task(id=f"u{index}", messages=(message,), answer="1", split=split))
        self.now_ms += 5_000
        self.write(REPORTS, Progress(role="master", instance="m"))
        self.decide()

    def write(self, topic: Topic, record: Control | Block) -> None:
        """One record at the end of a topic; the master reads it at once."""
        stored = self.topics[topic.name]
        offset = len(stored) + (TOKEN if topic is POLICIES else 0)
        message = LogMessage(Record(topic.name, 0, offset, self.now_ms, b"", b""), value=record)
        stored.append(message)
        self.order.append(message)
        take_in(self.plan, METRICS, message)

    def decide(self) -> None:
        """All that follows, stored as the master stores it."""
        while (decisions := self.plan.decide()) != NOTHING:
            self.plan.apply(decisions)
            for result in decisions.results:
                self.write(EVALS, result)
            for channel in decisions.channels:
                self.write(POLICIES, channel)
            for tasks in decisions.tasks.values():
                for task in tasks:
                    self.write(TASKS, task)

    def happen(self, what: int, number: int) -> None:
        """One thing that the others do, drawn from two numbers; then what the master makes of it."""
        random = Random(number)
        self.now_ms += random.randrange(4_000)
        (
            self._explorer, self._buffered, self._dropped, self._drawn, self._published, self._evaluated, self._rated,
            self._served, self._ordered, self._overtaken, self._moved, self._revised, self._evaluated, self._rated,
        )[what % 14](random)  # fmt: skip
        self.decide()

    def read_anew(self, token: int) -> Plan:
        """A master that reads all of it, as `run_master` does without a snapshot."""
        plan = new_plan(token)
        for message in self.topics[TASKS.name]:
            plan.issued(issued_in(message))
            plan.tick(message.timestamp_ms)
        self.give(plan, self.order)
        return plan

    def give(self, plan: Plan, messages: list[LogMessage]) -> None:
        """Messages but those of `tasks`, in the order in which they were stored."""
        for message in messages:
            if message.record.topic != TASKS.name:
                take_in(plan, METRICS, message)
        plan.caught_up()

    # ---- what the others do

    def _explorer(self, random: Random) -> None:
        groups = [name for name in self.plan.admission.outstanding if random.random() < 0.5]
        holds = {name: self.plan.admission.outstanding[name].attempt for name in groups}
        report = Progress(role="explore", instance=f"e{random.randrange(2)}", life="working", holds=holds)
        self.write(REPORTS, replace(report, partitions={TASKS.name: (random.randrange(2),)}))

    def _closed(self, random: Random, outcome: str) -> None:
        if waiting := [name for name, item in self.plan.admission.outstanding.items() if not item.buffered]:
            group = random.choice(waiting)
            one = self.plan.admission.outstanding[group]
            first = OVERTAKEN * ATTEMPTS_PER_LEASE if random.random() < 0.2 else one.attempt
            closure = Closure(group=group, outcome=outcome, attempt=first, sequence=one.sequence)  # type: ignore[arg-type]
            self.write(PROGRESS, replace(closure, mean_reward=random.random()))

    def _buffered(self, random: Random) -> None:
        self._closed(random, "buffered")

    def _dropped(self, random: Random) -> None:
        self._closed(random, "dropped")

    def _drawn(self, random: Random) -> None:
        groups = tuple(name for name, item in self.plan.admission.outstanding.items() if item.buffered)[:2]
        dropped = {group: "stale" for group in groups if random.random() < 0.2}
        taken = tuple(group for group in groups if group not in dropped)
        self.write(PROGRESS, Drawn(token=1, step=self.step, version=self.version, groups=taken, dropped=dropped))
        self.step += 1

    def _published(self, random: Random) -> None:
        self.version += 1
        name = f"m/{self.version}"
        self.write(
            POLICIES, PolicyEvent(event="published", policy="main", version=self.version, token=1, manifest=name)
        )

    def _evaluated(self, random: Random) -> None:
        waiting = [request for request in self.plan.evals.requests.values() if request.open and request.attempts]
        for request in waiting[:1]:
            passed = random.random() < 0.05
            for index, attempt in request.attempts.items():
                group = eval_group(request.suite, request.version, index)
                if passed:
                    closure = Closure(group=group, outcome="dropped", reason=VERSION_PASSED, attempt=attempt)
                    self.write(PROGRESS, closure)
                elif random.random() < 0.8:
                    self.write(EVALS, Block((_answer(request.suite, request.version, group, random),)))

    def _rated(self, random: Random) -> None:
        stable = self.plan.gate.stable
        for number in range(random.randrange(1, 6)):
            version = random.choice([stable.version, stable.trial, 0])
            name = f"hr-{random.randrange(10**9)}.0"
            rating = Rating(source="csat", value=random.choice([0.0, 1.0]), rater=f"r{random.randrange(40)}")
            closure = Closure(
                group=name, outcome="buffered", lane="live", version=max(0, version), trial=stable.trial,
                ratings=(replace(rating, time_ms=self.now_ms),), answered_ms=self.now_ms - number,
            )  # fmt: skip
            self.said.append(closure)
            self.write(PROGRESS, closure)

    def _revised(self, random: Random) -> None:
        if self.said:
            one = random.choice(self.said)
            self.write(
                PROGRESS,
                replace(one, revision=random.randrange(1, 4), ratings=one.ratings if random.random() < 0.5 else ()),
            )

    def _served(self, random: Random) -> None:
        stable = self.plan.gate.stable
        told = tuple(
            Answered(
                version=version,
                trial=stable.trial,
                answers=self.step + random.randrange(50),
                failed=random.randrange(9),
            )
            for version in {max(0, stable.version), max(0, stable.trial)}
        )
        self.write(REPORTS, Progress(role="serve", instance=f"s{random.randrange(2)}", answered=told, is_canary=True))

    def _ordered(self, random: Random) -> None:
        order = random.choice(["pause", "continue", "continue", "drain", "continue"])
        self.write(POLICIES, Directive(order=order, owner="ann"))  # type: ignore[arg-type]

    def _overtaken(self, random: Random) -> None:
        """A master that lost its lease and did not notice issues a group once more, or a new one."""
        task = self.plan.book.tasks[f"t{random.randrange(4)}"]
        round = max(0, self.plan.book.next_round(task.id) - random.randrange(2))
        issued = Issued(
            group=f"{task.id}.{round}", attempt=OVERTAKEN * ATTEMPTS_PER_LEASE, num_episodes=2, max_tokens=4,
            sequence=self.plan.admission.next_sequence,
        )  # fmt: skip
        self.write(TASKS, replace(task, issued=issued))

    def _moved(self, random: Random) -> None:
        event = random.choice(["pinned", "promoted", "rolled_back"])
        version = -1 if event == "pinned" and random.random() < 0.5 else random.randrange(self.version + 1)
        self.write(
            POLICIES,
            PolicyEvent(event=event, policy="main", version=version, channel="stable", owner="ann"),  # type: ignore[arg-type]
        )


def issued_in(message: LogMessage) -> Issued:
    assert isinstance(message.value, Task) and message.value.issued is not None
    return message.value.issued


def _answer(suite: str, version: int, group: str, random: Random) -> Experience:
    task = group.rpartition(".")[2]
    messages = (Message(role="user", content=task), Message(role="assistant", content=f"yes {random.randrange(3)}"))
    made = BASE.with_bulk(
        tokens=np.arange(8), logprobs=np.zeros(8, dtype=np.float32), messages=messages,
        spans=(replace(BASE.spans[0], start=0, stop=8, version=version),),
    )  # fmt: skip
    score = Score(name="exact", value=float(random.random() < 0.8))
    name = f"{group}.0-0-0"
    return replace(made, id=name, group=group, episode=0, part=0, last=True, suite=suite, scores=(score,))
