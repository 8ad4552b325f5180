"""After the drain: which version each gateway served, by the order of `policies` and by how far it had read them.

Stable: what was stable when it had read so far, so an older one at most until it hears of the move; before the first
promotion the newest published. Canary: the version on trial, and without one the stable. While it has not caught up with
what was there when it began to read: what its folder served last. A version that was promoted and taken back before it heard
of either is never among these.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from schemas import Directive, PolicyEvent
from tests.simulator.virtual_loop import Process

Kind = Literal["asks", "hears", "loads"]
KEPT = 2  # a life may die between a load and the note of it


class Happened(msgspec.Struct, frozen=True):
    """Something in the life of a gateway. asks: for the end of `policies`, hears: all before an offset, loads: a version."""

    kind: Kind
    value: int
    at_s: float


class ChannelState(msgspec.Struct, frozen=True):
    """Where the channels stand. version: what is stable, waiting: promoted under a pin, trial: what canaries
    serve; -1 for none.
    """

    version: int = -1
    waiting: int = -1
    pinned: bool = False
    trial: int = -1


class Stand(msgspec.Struct, frozen=True):
    """What the first records of `policies` say. published: versions of trainers that were not overtaken then, in order."""

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
    """After none, one, two … of the records; what overtaken masters and trainers wrote moves nothing."""
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
    """What a gateway loaded and should not have. told: see `stands`. kept: what its folder served last, before this life.

    refuses: it read weights that were altered, so where nothing was promoted it may do with older ones.
    """
    end, wrong = 0, []
    since: list[Stand] = []  # how it stood, as far as it had read, at some moment since the last load
    for one in course:
        if one.kind == "asks":
            end = one.value
        elif one.kind == "hears":
            since += [told[one.value]] if one.value >= end else []
        else:
            may = {stand.wanted(is_canary) for stand in since} if since else set(kept)
            if refuses:
                may |= {version for stand in since if stand.channel.version < 0 for version in stand.published}
            if one.value not in may:
                wrong.append(f"version {one.value} at {one.at_s:.4f}, expected one of {sorted(may)}")
            since = since[-1:]
    return wrong


def served_between(course: Sequence[Happened], from_s: float, to_s: float) -> set[int]:
    """Versions that an engine may have sampled with in a time; 0 is what it began with."""
    loads = [(one.at_s, one.value) for one in course if one.kind == "loads" and one.at_s <= to_s]
    before = [version for at_s, version in loads if at_s < from_s]
    return {before[-1] if before else 0} | {version for at_s, version in loads if at_s >= from_s}


def wrong_choices(
    courses: dict[Process, list[Happened]],
    policies: Iterable[Any],
    folders: dict[Process, str],
    altered: Iterable[Process],
) -> list[str]:
    """All that any gateway should not have loaded. folders: of each life, in the order in which they began."""
    told, kept, refusing = stands(policies), dict[str, list[int]](), set(altered)
    wrong = []
    for process, folder in folders.items():
        course, before = courses.get(process, []), kept.setdefault(folder, [])
        is_canary = process.name.startswith("canary")
        found = wrong_loads(course, told, is_canary=is_canary, kept=before[-KEPT:], refuses=process in refusing)
        wrong += [f"{process.name} serves {one}" for one in found]
        before += [one.value for one in course if one.kind == "loads"]
    return wrong
