"""The chain: one ordered list of steps, run alike by the Faust driver, by `reprocess` and in process.

Guarantees: every experience that goes in comes out exactly once, kept or dropped with a reason and the step that
dropped it; whatever a step raises, returns or waits for stays its own problem; what is kept carries the stamp of each
step that saw it.

    experience step   Experience -> Experience | [Experience, ...] | Drop
    score step        Experience -> float | None, recorded in `scores` under the step's name
    group step        (Experience, ...) -> (Experience | Drop, ..., made...), sees only the group itself

A score that fails or hangs drops the experience ("score failed", "score timed out"): leaving it out would re-weight the
others silently. A score that has no verdict returns None. Demonstrations (lane expert) are not scored.
"""

import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from infra import chain_calls
from infra.chain_calls import Extras, Failure
from infra.chain_faults import accepted, accepted_new, header_fault
from infra.processor import Drop, Memory, mark_of
from schemas import Experience, Score
from schemas.errors import ConfigError

StepKind = Literal["experience", "group", "score"]
DEFAULT_TIMEOUT_S = 10.0
MAX_REASON_CHARS = 80


class Step(msgspec.Struct, kw_only=True):
    """One bound function of a chain. kind: see the module. memory: entries per partition, 0 for none.

    reuse: a score already recorded under this name and version is not asked again. hung: threads that were given up.

    Example: Step(name="exact", version=1, kind="score", function=exact, inline=True)
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
    reuse: bool = True
    hung: list[threading.Thread] = []

    @property
    def stamp(self) -> str:
        """What an experience that passed carries: `name@version`."""
        return f"{self.name}@{self.version}"


class Context(msgspec.Struct, kw_only=True):
    """Where the experiences lie: log-append time and offset of their record, and what its partition remembers.

    Example: Context(time_ms=1763715600000, record_offset=981, memories=new_memories(steps))
    """

    time_ms: int = 0
    record_offset: int = -1
    memories: dict[str, Memory] = {}


class Dropped(msgspec.Struct, frozen=True):
    """An experience that goes no further. reason: a constant phrase; detail: what exactly; processor: the step's stamp.

    Example: Dropped(experience, "too short", "3 tokens, expected 8 or more", "filter@1")
    """

    experience: Experience
    reason: str
    detail: str = ""
    processor: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """All that went in and all that was made: members of the group first, then what was made, in other groups."""

    kept: tuple[Experience, ...]
    dropped: tuple[Dropped, ...]


def make_step(
    name: str, function: Callable[..., Any], *, timeout_s: float = DEFAULT_TIMEOUT_S, reuse: bool = True
) -> Step:
    """A step from a marked function with its options bound; raises ConfigError when it fits no kind of step."""
    try:
        mark = mark_of(function)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error
    if mark.kind == "feedback":
        raise ConfigError(f"{name}: got a @feedback function, expected @processor or @score")
    parameters = list(inspect.signature(function).parameters.values())
    first = parameters[0].name if parameters else ""
    if mark.kind == "processor" and first not in ("experience", "group"):
        raise ConfigError(f'{name}: first parameter is "{first}", expected "experience" or "group"')
    fills = tuple(p.name for p in parameters if p.name in ("memory", "time_ms", "record_offset"))
    if ("memory" in fills) != (mark.memory > 0):
        raise ConfigError(f"{name}: a parameter `memory` and @processor(memory=entries) go together, got one of them")
    kind: StepKind = "score" if mark.kind == "score" else "group" if first == "group" else "experience"
    bare = getattr(function, "func", function)
    asynchronous = inspect.iscoroutinefunction(bare) or inspect.iscoroutinefunction(type(bare).__call__)
    if asynchronous and mark.memory:
        raise ConfigError(f"{name}: got an async processor with memory, expected a plain function (log order)")
    return Step(
        name=name, version=mark.version, kind=kind, function=function, timeout_s=timeout_s, inline=mark.inline,
        asynchronous=asynchronous, memory=mark.memory, fills=fills, reuse=reuse,
    )  # fmt: skip


def new_memories(steps: Sequence[Step]) -> dict[str, Memory]:
    """Empty memories of one partition, by step name, for the steps that remember."""
    return {step.name: Memory(step.memory) for step in steps if step.memory}


async def run_chain(steps: Sequence[Step], experiences: Sequence[Experience], context: Context) -> Outcome:
    """Pass experiences of one group through the steps. Never raises for what a step does."""
    flow = _Flow(experiences)
    for index, step in enumerate(steps):
        if not flow.members:
            break
        extras = _extras(step, context)
        if step.kind == "group":
            group = tuple(member for member in flow.members if member.group == flow.group)
            if group:
                (result,) = await _call(step, [group], extras)
                _settle_group(flow, step, index, group, result)
            continue
        asked = flow.members
        if step.kind == "score":
            asked = [member for member in asked if _is_to_be_scored(member, step)]
        results = await _call(step, asked, extras)
        _settle_each(flow, step, index, asked, results)
    return flow.outcome(steps)


class _Flow:
    """Who is still in the chain, who left it, and at which step each made experience came in."""

    def __init__(self, experiences: Sequence[Experience]) -> None:
        self.members: list[Experience] = list(experiences)
        self.group = experiences[0].group if experiences else ""
        self.dropped: list[tuple[Experience, int, str, str]] = []
        self.made_at: dict[str, int] = {}

    def drop(self, experience: Experience, index: int, reason: str, detail: str) -> None:
        self.dropped.append((experience, index, reason, detail))

    def outcome(self, steps: Sequence[Step]) -> Outcome:
        stamps = tuple(step.stamp for step in steps)
        kept: list[Experience] = []
        for member in self.members:
            fault = header_fault(member)
            if fault:
                self.drop(member, len(stamps) - 1, "processor returned nonsense", fault)
            else:
                kept.append(member)

        def stamped(experience: Experience, until: int) -> Experience:
            passed = stamps[self.made_at.get(experience.id, 0) : until]
            return msgspec.structs.replace(experience, stamps=experience.stamps + passed)

        return Outcome(
            kept=tuple(stamped(member, len(stamps)) for member in kept),
            dropped=tuple(
                Dropped(stamped(experience, index + 1), reason, detail, stamps[index])
                for experience, index, reason, detail in self.dropped
            ),
        )


def _extras(step: Step, context: Context) -> Extras:
    extras: dict[str, Any] = {}
    for name in step.fills:
        if name == "memory":
            extras[name] = context.memories.setdefault(step.name, Memory(step.memory))
        else:
            extras[name] = context.time_ms if name == "time_ms" else context.record_offset
    return extras


async def _call(step: Step, arguments: Sequence[object], extras: Extras) -> list[object]:
    if not arguments:
        return []
    if step.asynchronous:
        return await chain_calls.as_tasks(step.function, arguments, extras, step.timeout_s)
    if step.inline:
        return chain_calls.inline(step.function, arguments, extras)
    return await chain_calls.in_thread(step.function, arguments, extras, step.timeout_s, step.hung)


def _is_to_be_scored(experience: Experience, step: Step) -> bool:
    if experience.lane == "expert":
        return False
    version = str(step.version)
    known = any(score.name == step.name and score.version == version for score in experience.scores)
    return not (known and step.reuse)


def _settle_each(flow: _Flow, step: Step, index: int, asked: Sequence[Experience], results: Sequence[object]) -> None:
    """Put one result per asked experience in its place, keeping the order of the others."""
    answers = zip(asked, results, strict=True)
    awaited, result = next(answers, (None, None))
    members: list[Experience] = []
    for member in flow.members:
        if member is not awaited:
            members.append(member)
            continue
        if result is member:
            members.append(member)
        elif isinstance(result, Failure):
            flow.drop(member, index, f"{_noun(step)} {result.kind}", f"{step.stamp}: {result.detail}")
        elif step.kind == "score":
            members.extend(_settle_score(flow, step, index, member, result))
        elif isinstance(result, list):
            members.extend(_settle_list(flow, step, index, member, result))
        else:
            members.extend(_settle_one(flow, step, index, member, result))
        awaited, result = next(answers, (None, None))
    flow.members = members


def _settle_one(flow: _Flow, step: Step, index: int, member: Experience, result: object) -> list[Experience]:
    """The member as it goes on: nobody after a Drop or nonsense."""
    if isinstance(result, Drop):
        fault = _drop_fault(result)
        if not fault:
            flow.drop(member, index, result.reason, str(result.detail)[: chain_calls.MAX_DETAIL_CHARS])
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
    try:
        value = math.nan if isinstance(result, str | bytes) else float(result)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        fault = f"{step.stamp}: got {str(result)[:60]!r} ({type(result).__name__}), expected a finite number or None"
        flow.drop(member, index, "score returned nonsense", fault)
        return []
    others = tuple(score for score in member.scores if score.name != step.name)
    verdict = Score(name=step.name, value=value, version=str(step.version))
    return [msgspec.structs.replace(member, scores=(*others, verdict))]


def _settle_list(
    flow: _Flow, step: Step, index: int, member: Experience, results: Sequence[object]
) -> list[Experience]:
    """A list holds the member, or not (then it was replaced), and what was made from it."""
    own = [result for result in results if isinstance(result, Experience) and result.id == member.id]
    others = [result for result in results if not (isinstance(result, Experience) and result.id == member.id)]
    made = _made(flow, others, (member,))
    next_state = _guarded(accepted, member, own[0]) if own else member
    if not results:
        next_state = "got an empty list, expected Drop(reason)"
    elif len(own) > 1:
        next_state = f"id: {member.id} is {len(own)} times in the list"
    fault = made if isinstance(made, str) else next_state
    if isinstance(made, str) or isinstance(next_state, str):
        flow.drop(member, index, "processor returned nonsense", f"{step.stamp}: {fault}")
        return []
    flow.made_at.update((experience.id, index) for experience in made)
    if not own:
        flow.drop(member, index, "replaced", f"by {len(made)} others")
        return made
    return [next_state, *made]


def _settle_group(flow: _Flow, step: Step, index: int, group: tuple[Experience, ...], result: object) -> None:
    """Members by position, then what was made; a group whose step failed is dropped whole."""
    others = [member for member in flow.members if member.group != flow.group]
    reason = "processor returned nonsense"
    made: list[Experience] | str
    if isinstance(result, Failure):
        reason, made = f"processor {result.kind}", result.detail
    elif not isinstance(result, tuple | list):
        made = f"got {type(result).__name__}, expected a tuple with each member or a Drop in its place"
    elif len(result) < len(group):
        made = f"got {len(result)} of {len(group)} members, expected each member or a Drop in its place"
    else:
        made = _made(flow, result[len(group) :], group)
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
    """What a step made, checked, or what is wrong with it."""
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
    except Exception as error:
        return f"cannot be checked: {chain_calls.describe_error(error)}"


def _drop_fault(drop: Drop) -> str:
    if not isinstance(drop.reason, str) or not 0 < len(drop.reason) <= MAX_REASON_CHARS:
        return f"Drop.reason: got {str(drop.reason)[:60]!r}, expected a phrase of 1 to {MAX_REASON_CHARS} characters"
    return ""


def _noun(step: Step) -> str:
    return "score" if step.kind == "score" else "processor"
