"""The chains: ordered lists of steps, for groups, tasks and training batches.

Guarantees: every experience or task that goes in comes out exactly once, kept or dropped with a reason and the step that
dropped it; a step that raises, hangs or returns an invalid result does not stop the chain; a kept experience carries the
stamp of each step that saw it.

    experience step   Experience -> Experience | Drop
    score step        Experience -> float | Verdict | None, recorded in `scores` under the step's name
    group step        (Experience, ...) -> (Experience | Drop, ..., made...), sees only the group itself
    batch step        (Experience, ...) -> (Experience | Drop, ...), sees all that an optimizer step would train on
    task step         Task -> Task | [Task, ...] | Drop: a list holds the task itself, and variations of it

A score that fails or hangs drops the experience ("score failed", "score timed out"): leaving it out would re-weight the
others silently. A score that has no verdict returns None, or a Verdict that says why, which is counted. Demonstrations
(lane expert) are not scored. A withdrawal passes: no step is asked about it, or the withdrawn copy would be trained.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import msgspec

from infra.chain import calls
from infra.chain.calls import MAX_DETAIL_CHARS, Failure, Trouble
from infra.chain.faults import MAX_REASON_CHARS, accepted, accepted_new, drop_fault, header_faults
from infra.chain.processor import Drop, Memory, Unit, Verdict, declared_mark
from infra.chain.verdict import Question, Recorded, input_hash, options_hash, read_verdict
from infra.settings.plugin import RESERVED_PARAMETERS
from schemas import BadFrame, Experience, Score, Task
from schemas.errors import ConfigError
from schemas.experience import is_withdrawal

NONSENSE = "processor returned nonsense"


class ChainTurn:
    """A record's turn at the steps with memory, in log order. Not safe across event loops."""

    def __init__(self, before: "ChainTurn | None" = None) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._before = before._over if before is not None else self._over
        self.limit: asyncio.Timeout | None = None  # of handling the record: waiting for others does not count

    async def wait(self) -> None:
        """Wait until every earlier record has passed the steps with memory, or left the chain."""
        if self._before is self._over or self._before.done():
            return
        now = asyncio.get_running_loop().time
        expires = self.limit.when() if self.limit is not None else None
        if self.limit is None or expires is None:
            await asyncio.wait((self._before,))
            return
        left_s = expires - now()
        self.limit.reschedule(None)
        await asyncio.wait((self._before,))
        self.limit.reschedule(now() + left_s)

    def end(self) -> None:
        """The record needs no further step with memory; a second call changes nothing."""
        if self._before is self._over or self._before.done():
            self._end_now()
        else:
            self._before.add_done_callback(self._end_now)

    def _end_now(self, _: object = None) -> None:
        if not self._over.done():
            self._over.set_result(None)


StepKind = Unit | Literal["score"]
UNITS = get_args(Unit)
DEFAULT_TIMEOUT_S = 10.0


class Step(msgspec.Struct, kw_only=True):
    """A bound function of a chain. memory: entries per partition. fills: keyword parameters that the chain passes.

    question: hash of a score's options, "" for a score whose answers are not kept for reuse.
    """

    name: str
    version: int
    kind: StepKind
    function: Callable[..., Any]
    timeout_s: float = DEFAULT_TIMEOUT_S
    inline: bool = False
    asynchronous: bool = False
    memory: int = 0
    fills: tuple[str, ...] = ()
    question: str = ""
    trouble: Trouble = msgspec.field(default_factory=Trouble)

    @property
    def stamp(self) -> str:
        """Stamp of an experience that passed: `name@version`."""
        return f"{self.name}@{self.version}"


class Context(msgspec.Struct, kw_only=True):
    """State passed along with experiences. record_offset: of their record, -1 for none. memories: by step, of the partition.

    turn: waited for before a step that remembers and ended behind the last one, so memories see records in log order; None if
    records come one at a time. recorded: scores of outside verdicts that need not be asked for again.
    """

    record_offset: int = -1
    memories: dict[str, Memory] = {}
    turn: ChainTurn | None = None
    recorded: Recorded | None = None


class Dropped(msgspec.Struct, frozen=True):
    """An experience that the chain dropped. reason: a constant phrase. detail: in words. processor: the step's stamp."""

    experience: Experience
    reason: str
    detail: str = ""
    processor: str = ""


class ChainResult(msgspec.Struct, frozen=True):
    """Every experience that went in or that a step made: members of the group first, then made experiences, in other groups.

    absent: number of missing verdicts, by (score, reason).
    """

    kept: tuple[Experience, ...]
    dropped: tuple[Dropped, ...]
    absent: dict[tuple[str, str], int] = {}


def make_step(
    name: str,
    function: Callable[..., Any],
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    options: Mapping[str, Any] | None = None,
) -> Step:
    """A step from a marked function with its options bound; raises ConfigError when it fits no kind of step.

    options: those it was given, which an instance need not show: a verdict under others is not reused.
    """
    try:
        mark = declared_mark(function)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if mark.kind == "feedback":
        raise ConfigError(f"{name}: got a @feedback function, expected @processor or @score")
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0].name if parameters else ""
    unit = mark.of or first
    if mark.kind == "processor" and unit not in UNITS:
        raise ConfigError(f'{name}: first parameter is "{first}", expected {" or ".join(UNITS)}, or @processor(of=)')
    fills = tuple(p.name for p in parameters if p.name in RESERVED_PARAMETERS)
    if ("memory" in fills) != (mark.memory > 0):
        raise ConfigError(f"{name}: a parameter `memory` and @processor(memory=entries) go together, got one of them")
    kind: StepKind = "score" if mark.kind == "score" else cast(Unit, unit)
    bare = getattr(function, "func", function)
    asynchronous = inspect.iscoroutinefunction(bare) or inspect.iscoroutinefunction(type(bare).__call__)
    if asynchronous and mark.memory:
        raise ConfigError(f"{name}: got an async processor with memory, expected a plain function (log order)")
    return Step(
        name=name, version=mark.version, kind=kind, function=function, timeout_s=timeout_s, inline=mark.inline,
        asynchronous=asynchronous, memory=mark.memory, fills=fills, trouble=Trouble(f"{name}@{mark.version}"),
        question=options_hash(function, options or {}) if kind == "score" and not mark.inline else "",
    )  # fmt: skip


def new_memories(steps: Sequence[Step]) -> dict[str, Memory]:
    """Empty memories of one partition, by step name, for the steps that remember."""
    return {step.name: Memory(step.memory) for step in steps if step.memory}


async def run_chain(steps: Sequence[Step], experiences: Sequence[Experience], context: Context) -> ChainResult:
    """Pass experiences of one group through the steps. Never raises for what a step does."""
    flow = _Flow(experiences)
    last_memory = max((index for index, step in enumerate(steps) if step.memory), default=-1)
    for index, step in enumerate(steps):
        if not flow.members:
            break
        await _take_turn(context, step, index == last_memory + 1)
        if step.kind in ("group", "batch"):
            group = tuple(member for member in flow.members if step.kind == "batch" or member.group == flow.group)
            if group:
                (result,) = await call_step(step, [group], context)
                _settle_group(flow, step, index, group, result)
            continue
        asked = [member for member in flow.members if not is_withdrawal(member)]
        if step.kind == "score":
            asked = [member for member in asked if not member.is_given]
            results = await _scored(flow, step, asked, context)
        else:
            results = await call_step(step, asked, context)
        _settle_each(flow, step, index, asked, results)
    return flow.outcome(steps)


class _Flow:
    def __init__(self, experiences: Sequence[Experience]) -> None:
        self.members: list[Experience] = list(experiences)
        self.group = experiences[0].group if experiences else ""
        self.dropped: list[tuple[Experience, int, str, str]] = []
        self.made_at: dict[str, int] = {}
        self.inputs: dict[str, str] = {}  # of the present score step: hash of its input, by member
        self.absent: dict[tuple[str, str], int] = {}

    def drop(self, experience: Experience, index: int, reason: str, detail: str) -> None:
        self.dropped.append((experience, index, reason, detail))

    def outcome(self, steps: Sequence[Step]) -> ChainResult:
        stamps = tuple(step.stamp for step in steps)
        kept: list[Experience] = []
        for member, fault in zip(self.members, header_faults(self.members), strict=True):
            if fault:
                self.drop(member, len(stamps) - 1, NONSENSE, fault)
            else:
                kept.append(member)

        def stamped(experience: Experience, until: int) -> Experience:
            passed = stamps[self.made_at.get(experience.id, 0) : until]
            return msgspec.structs.replace(experience, stamps=experience.stamps + passed)

        return ChainResult(
            kept=tuple(stamped(member, len(stamps)) for member in kept),
            dropped=tuple(
                Dropped(stamped(experience, index + 1), reason, detail, stamps[index])
                for experience, index, reason, detail in self.dropped
            ),
            absent=self.absent,
        )


async def _take_turn(context: Context, step: Step, is_behind_memory: bool) -> None:
    if context.turn is not None and step.memory:
        await context.turn.wait()
    elif context.turn is not None and is_behind_memory:
        context.turn.end()


async def call_step(step: Step, arguments: Sequence[object], context: Context) -> list[object]:
    """One result or Failure per argument, within the step's timeout. Never raises for a fault of the step."""
    known: dict[str, Any] = {"record_offset": context.record_offset}
    if step.memory:
        known["memory"] = context.memories.setdefault(step.name, Memory(step.memory))
    extras = {name: known[name] for name in step.fills}
    function = functools.partial(step.function, **extras) if extras else step.function
    if not arguments:
        return []
    if step.asynchronous:
        return await calls.as_tasks(function, arguments, step.timeout_s, step.trouble)
    if step.inline:
        return calls.inline(function, arguments, step.trouble)
    return await calls.in_thread(function, arguments, step.timeout_s, step.trouble)


async def _scored(flow: _Flow, step: Step, asked: Sequence[Experience], context: Context) -> list[object]:
    """Verdicts in the order of `asked`: those on record for the very same input, and for the others the step's own."""
    flow.inputs = {}
    known: dict[str, Verdict | Failure] = {}
    if step.question:
        for member in asked:
            try:
                flow.inputs[member.id] = input_hash(step.question, member)
            except BadFrame:  # the step meets it itself
                continue
            question = Question(member.id, step.name, str(step.version), flow.inputs[member.id])
            verdict = context.recorded(question) if context.recorded is not None else None
            if verdict is not None:
                known[member.id] = verdict
    answers = iter(await call_step(step, [member for member in asked if member.id not in known], context))
    return [known[member.id] if member.id in known else next(answers) for member in asked]


def _settle_each(flow: _Flow, step: Step, index: int, asked: Sequence[Experience], results: Sequence[object]) -> None:
    answers = zip(asked, results, strict=True)
    awaited, result = next(answers, (None, None))
    members: list[Experience] = []
    for member in flow.members:
        if member is not awaited:
            members.append(member)
            continue
        try:
            members.extend(_settle(flow, step, index, member, result))
        except BaseException as error:  # raised by the result itself
            flow.drop(member, index, f"{_noun(step)} returned nonsense", f"{step.stamp}: {calls.describe_error(error)}")
        awaited, result = next(answers, (None, None))
    flow.members = members


def _settle(flow: _Flow, step: Step, index: int, member: Experience, result: object) -> list[Experience]:
    if result is member:
        return [member]
    if isinstance(result, Failure):
        flow.drop(member, index, f"{_noun(step)} {result.kind}", f"{step.stamp}: {result.detail}")
        return []
    if step.kind == "score":
        return _settle_score(flow, step, index, member, result)
    return _settle_one(flow, step, index, member, result)


def _settle_one(flow: _Flow, step: Step, index: int, member: Experience, result: object) -> list[Experience]:
    """The member after the step; empty after a Drop or a result that is not valid."""
    if isinstance(result, Drop):
        fault = drop_fault(result)
        if not fault:
            flow.drop(member, index, result.reason, str(result.detail)[: calls.MAX_DETAIL_CHARS])
            return []
    else:
        next_state = _guarded(accepted, member, result)
        if isinstance(next_state, Experience):
            return [next_state]
        fault = next_state
    flow.drop(member, index, f"{_noun(step)} returned nonsense", f"{step.stamp}: {fault}")
    return []


def _settle_score(flow: _Flow, step: Step, index: int, member: Experience, result: object) -> list[Experience]:
    if result is None:
        return [member]
    verdict = read_verdict(result)
    if isinstance(verdict, str):
        flow.drop(member, index, "score returned nonsense", f"{step.stamp}: {verdict}")
        return []
    if verdict.value is None:
        why = (step.name, str(verdict.reason)[:MAX_REASON_CHARS] or "no verdict")
        flow.absent[why] = flow.absent.get(why, 0) + 1
        return [member]
    others = tuple(score for score in member.scores if score.name != step.name)
    version = f"{step.version}+{verdict.model}" if verdict.model else str(step.version)
    asked = flow.inputs.get(member.id, "")
    given = Score(name=step.name, value=verdict.value, version=version, input=asked)
    return [msgspec.structs.replace(member, scores=(*others, given))]


def _settle_group(flow: _Flow, step: Step, index: int, group: tuple[Experience, ...], result: object) -> None:
    others = [member for member in flow.members if step.kind == "group" and member.group != flow.group]
    reason = NONSENSE
    made: list[Experience] | str
    if isinstance(result, Failure):
        reason, made = f"processor {result.kind}", result.detail
    elif not isinstance(result, tuple | list):
        made = f"got {type(result).__name__}, expected a tuple with each member or a Drop in its place"
    elif len(result) < len(group) or (step.kind == "batch" and len(result) > len(group)):
        made = f"got {len(result)} of {len(group)} members, expected each member or a Drop in its place"
    else:
        made = _made(flow, result[len(group) :], group) if len(result) > len(group) else []
    if isinstance(made, str):
        for member in group:
            flow.drop(member, index, reason, f"{step.stamp}: {made}")
        flow.members = others
        return
    assert isinstance(result, tuple | list)
    members: list[Experience] = []
    for member, replacement in zip(group, result, strict=False):
        members.extend([member] if replacement is member else _settle_one(flow, step, index, member, replacement))
    flow.made_at.update((experience.id, index) for experience in made)
    flow.members = [*members, *others, *made]


def _made(flow: _Flow, results: Sequence[object], parents: Sequence[Experience]) -> list[Experience] | str:
    known = {member.id for member in flow.members} | set(flow.made_at)
    made: list[Experience] = []
    for result in results:
        experience = _guarded(accepted_new, result, parents)
        if isinstance(experience, str):
            return experience
        if experience.id in known:
            return f"id: {experience.id} is there already"
        known.add(experience.id)
        made.append(experience)
    return made


def _guarded(check: Callable[..., Experience | str], *arguments: object) -> Experience | str:
    """A check on an object of any shape: one that cannot even be looked at is nonsense too."""
    try:
        return check(*arguments)
    except BaseException as error:
        return f"cannot be checked: {calls.describe_error(error)}"


def _noun(step: Step) -> str:
    return "score" if step.kind == "score" else "processor"


class DroppedTask(NamedTuple):
    """A task that goes no further. reason: a constant phrase. processor: the step's stamp."""

    task: Task
    reason: str
    detail: str
    processor: str


async def run_task_chain(steps: Sequence[Step], task: Task, context: Context) -> tuple[list[Task], list[DroppedTask]]:
    """The task and its variations that passed the steps, and the others. Never raises for a fault of a step."""
    members = [task]
    dropped: list[DroppedTask] = []
    last_memory = max((index for index, step in enumerate(steps) if step.memory), default=-1)
    for index, step in enumerate(steps):
        if not members:
            break
        await _take_turn(context, step, index == last_memory + 1)
        results = await call_step(step, members, context)
        passed: list[Task] = []
        for member, result in zip(members, results, strict=True):
            following = _settled(step, member, result, {known.id for known in (*members, *passed)})
            if isinstance(following, DroppedTask):
                dropped.append(following)
            else:
                passed += following
        members = passed
    return members, dropped


def _settled(step: Step, member: Task, result: object, known: set[str]) -> list[Task] | DroppedTask:
    if isinstance(result, Failure):
        return DroppedTask(member, f"processor {result.kind}", f"{step.stamp}: {result.detail}", step.stamp)
    results = list(result) if isinstance(result, list | tuple) else [result]
    tasks = [result for result in results if isinstance(result, Task)]
    if isinstance(result, Drop):
        fault = drop_fault(result)
        if not fault:
            return DroppedTask(member, result.reason, str(result.detail)[:MAX_DETAIL_CHARS], step.stamp)
    else:
        fault = next(filter(None, map(task_fault, results)), "") or _family_fault(member, tasks, known)
    return DroppedTask(member, NONSENSE, f"{step.stamp}: {fault}", step.stamp) if fault else tasks


def _family_fault(member: Task, tasks: Sequence[Task], known: set[str]) -> str:
    """Fault of a task and its variations together, "" for none; `known` takes the new ids."""
    own = sum(task.id == member.id for task in tasks)
    if own != 1:
        return f"id: got {member.id} {own} times, expected the task itself once, or Drop(reason)"
    for task in tasks:
        if task.id != member.id and task.parent != member.id:
            return f"parent: got {task.parent!r} on {task.id}, expected {member.id!r}, which it was made from"
        if task.id != member.id and task.id in known:
            return f"id: {task.id} is there already"
        known.add(task.id)
    return ""


def task_fault(task: object) -> str:
    """Reason why a task is unusable, "" for none."""
    if not isinstance(task, Task):
        return f"got {type(task).__name__}, expected a Task, a list of them, or Drop"
    try:
        msgspec.convert(msgspec.to_builtins(task), Task)
    except Exception as error:  # an object of a shape that cannot even be looked at
        return f"task: {error}"
    if not task.id or task.id.endswith("."):
        return f"id: got {task.id!r}, expected a name that does not end in a dot"
    if not any(message.content.strip() for message in task.messages):
        return f"messages: task {task.id} asks nothing"
    return ""
