"""After the drain: evaluations, promotions, and the version that each gateway served, by independent readings of the log.

A stable gateway serves the stable version of the records that it has read, before the first promotion the newest version. A
canary serves the version on trial, else the stable version. Until a gateway has read the records from before its start, it
serves its folder's last version. It never serves a version that was promoted and taken back before it heard of either."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from schemas import Block, Closure, Directive, EvalResult, PolicyEvent, topics
from schemas.ids import session_of
from tests.simulator.scenario import SUITE
from tests.simulator.virtual_loop import Process
from tests.simulator.watch import Happened, members_of
from tests.simulator.world import World

KEPT = 2  # a life may die between a load and the note of it


class ChannelState(msgspec.Struct, frozen=True):
    version: int = -1
    waiting: int = -1
    pinned: bool = False
    trial: int = -1


class Stand(msgspec.Struct, frozen=True):
    channel: ChannelState = ChannelState()
    published: tuple[int, ...] = ()

    def wanted(self, is_canary: bool) -> int:
        """The version that a gateway serves, -1 for none."""
        if is_canary and self.channel.trial >= 0:
            return self.channel.trial
        return self.channel.version if self.channel.version >= 0 else max(self.published, default=-1)


def step(channel: ChannelState, event: PolicyEvent) -> ChannelState:
    """The channels after one of their events."""
    replace = msgspec.structs.replace
    if event.channel == "canary":
        trial = -1 if event.version == channel.version else event.version
        return replace(channel, trial=trial) if event.event == "promoted" else channel
    if event.channel != "stable":
        return channel
    if event.event == "held":
        return replace(channel, trial=-1) if event.version == channel.trial else channel
    if event.event == "promoted" and event.version == channel.version and not channel.pinned:
        return replace(channel, waiting=event.version)
    if event.event == "promoted":
        return ChannelState(channel.version if channel.pinned else event.version, event.version, channel.pinned)
    if event.event == "pinned" and event.version >= 0:
        return ChannelState(event.version, channel.waiting, True)
    if event.event == "pinned":
        return ChannelState(channel.waiting if channel.waiting >= 0 else channel.version, channel.waiting)
    return ChannelState(event.version, event.version) if event.event == "rolled_back" else channel


def stands(policies: Iterable[Any]) -> list[Stand]:
    """The stands after 0, 1, 2 … records; records of overtaken masters and trainers move nothing."""
    stand, lease, master = Stand(), -1, -1
    found = [stand]
    for offset, event in enumerate(policies):
        if isinstance(event, Directive) and event.order == "lease":
            master = offset
        elif isinstance(event, PolicyEvent) and not (event.owner == "gate" and event.token < master):
            channel, published = step(stand.channel, event), stand.published
            if event.event == "lease":
                lease = offset
            elif event.event == "published" and event.token >= lease:
                published = (*published, event.version)
            stand = Stand(channel, published)
        found.append(stand)
    return found


def wrong_loads(
    course: Sequence[Happened], told: Sequence[Stand], *, is_canary: bool, kept: Sequence[int], refuses: bool = False
) -> list[str]:
    """Wrongly loaded versions of a gateway. told: see `stands`. kept: the versions its folder served last, before this life.

    refuses: it read weights that were altered, so where nothing was promoted it may do with older ones.
    """
    end, wrong = 0, []
    since: list[Stand] = []  # how it stood, as far as it had read, at some moment since the last load
    for happening in course:
        if happening.kind == "asks":
            end = happening.value
        elif happening.kind == "hears":
            since += [told[happening.value]] if happening.value >= end else []
        else:
            may = {stand.wanted(is_canary) for stand in since} if since else set(kept)
            if refuses:
                may |= {version for stand in since if stand.channel.version < 0 for version in stand.published}
            if happening.value not in may:
                wrong.append(f"version {happening.value} at {happening.at_s:.4f}, expected one of {sorted(may)}")
            since = since[-1:]
    return wrong


def served_between(course: Sequence[Happened], from_s: float, to_s: float) -> set[int]:
    """Versions that an engine may have sampled with in a span of time; an engine begins with version 0."""
    loads = [
        (happening.at_s, happening.value)
        for happening in course
        if happening.kind == "loads" and happening.at_s <= to_s
    ]
    before = [version for at_s, version in loads if at_s < from_s]
    return {before[-1] if before else 0} | {version for at_s, version in loads if at_s >= from_s}


def wrong_choices(
    courses: dict[Process, list[Happened]],
    policies: Iterable[Any],
    folders: dict[Process, str],
    altered: Iterable[Process],
) -> list[str]:
    told, kept, refusing = stands(policies), dict[str, list[int]](), set(altered)
    wrong = []
    for process, folder in folders.items():
        course, before = courses.get(process, []), kept.setdefault(folder, [])
        is_canary = process.name.startswith("canary")
        found = wrong_loads(course, told, is_canary=is_canary, kept=before[-KEPT:], refuses=process in refusing)
        wrong += [f"{process.name} serves {found_item}" for found_item in found]
        before += [happening.value for happening in course if happening.kind == "loads"]
    return wrong


Logged = dict[str, list[tuple[Any, Any]]]


def settle_serving(world: World, log: Logged) -> None:
    """Complain about everything that does not hold."""
    check_results(world, log)
    check_verdicts(world, log)
    check_served(world, log)
    check_choices(world, log)
    check_customers(world, log)


def check_results(world: World, log: Logged) -> None:
    """A result counts the first answer to each task, by exactly its version and by nothing else."""
    answers: dict[str, dict[int, float]] = {}
    mixed: set[str] = set()
    closed = {topic.group for _, topic in log[topics.PROGRESS.name] if isinstance(topic, Closure)}
    for _, value in log[topics.EVALS.name]:
        if isinstance(value, Block):
            for member in value.experiences:
                version = int(member.group.rpartition(".")[0].rpartition("-")[2])
                is_first = member.episode not in answers.get(member.group, {})  # a later attempt counts for nothing
                if is_first and any(span.version != version for span in member.spans):
                    mixed.add(f"{SUITE}-{version}")
                answers.setdefault(member.group, {}).setdefault(member.episode, member.score("parity") or 0.0)
        elif isinstance(value, EvalResult):
            name = f"{value.suite}-{value.version}"
            found = {group: given for group, given in answers.items() if group.startswith(f"eval-{name}.")}
            right = sum(score >= 1.0 for given in found.values() for score in given.values())
            missing = [group for group in _groups(name, value.num_tasks) if group not in found and group not in closed]
            if name in mixed:
                world.watch.complain("evals are of one version", f"{name} has a result, and tokens of another version")
            if missing or right != value.num_correct:
                world.watch.complain("evals count", f"{name}: {right} right, {missing} not answered; {value}")


def check_verdicts(world: World, log: Logged) -> None:
    """The gate decides nothing without a result, and by that result."""
    results = {value.version: value for _, value in log[topics.EVALS.name] if isinstance(value, EvalResult)}
    newest = -1
    for record, event in log[topics.POLICIES.name]:
        if isinstance(event, Directive) and event.order == "lease":
            newest = record.offset
        if isinstance(event, PolicyEvent) and event.owner == "gate" and event.token >= newest:
            result, own = results.get(event.version), event.stats.get(SUITE)
            if result is None or own != result.accuracy:
                world.watch.complain("the gate decides by results", f"{event}; results {results}")


def check_served(world: World, log: Logged) -> None:
    """Every gateway that is there serves its channel's version, once everything has been read; before the first promotion
    a gateway that read altered weights may have given up the newest version.
    """
    stand = stands(event for _, event in log[topics.POLICIES.name])[-1]
    refusing = {process.name for process, count in world.watch.altered.items() if count}
    for name, version in world.served.items():
        wanted = stand.wanted(name.startswith("canary"))
        world.watch.seen[f"{name.partition('#')[0]} there at the end"] += wanted >= 0
        if wanted >= 0 and version != wanted and not (name in refusing and stand.channel.version < 0):
            world.watch.complain("customers get what is stable", f"{name} serves {version}, expected {wanted}: {stand}")


def check_choices(world: World, log: Logged) -> None:
    """Every answer is by a version that its gateway may have served then."""
    watch = world.watch
    folders = {process: str(life.folder) for process, life in world.gateways.items()}
    altered = [process for process, count in watch.altered.items() if count]
    policies = [event for _, event in log[topics.POLICIES.name]]
    for wrong in wrong_choices(watch.courses, policies, folders, altered):
        watch.complain("customers get what was decided, as far as it was heard", wrong)
    recorded = {member.id: member for _, block in log[topics.EXPERIENCES.name] for member in members_of(block)}
    for name, process in world.customers.answered.items():
        served = served_between(watch.courses[process], *world.customers.times[name])
        given = {span.version for span in recorded[name].spans} if name in recorded else set()
        watch.seen[f"answers of {process.name.partition('#')[0]}"] += bool(given)
        if not given <= served:
            watch.complain("answers name who gave them", f"{name} of {process.name} by {given}, it served {served}")


def check_customers(world: World, log: Logged) -> None:
    customers = world.customers
    recorded = {member.id: member for _, block in log[topics.EXPERIENCES.name] for member in members_of(block)}
    for name, item in recorded.items():
        if session_of(item.group) in customers.private:
            world.watch.complain("consent", f"{name} is in the log, and its customer did not agree")
    for name, text in customers.texts.items():
        if name in recorded and recorded[name].messages[-1].content != text:
            said = recorded[name].messages[-1].content
            world.watch.complain("served as recorded", f"{name} was told {text!r}, recorded is {said!r}")
    world.watch.seen.update(
        kind
        for metrics in world.metrics.values()
        for kind, count in metrics.counters().items()
        if count and kind.startswith(("spooled", "snapshots_"))
    )


def _groups(name: str, num_tasks: int) -> list[str]:
    return [f"eval-{name}.{index}" for index in range(num_tasks)]
