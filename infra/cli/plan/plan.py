"""`headrace plan`: what rates need, computed from measured unit costs: bytes and disk by topic, processes, partitions,
and what is full first.

Processor time is of one core: a process of headrace uses little more. How many tokens an engine samples
and a trainer takes depends on model and card, so both are asked for and not guessed. Pure but for `run`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from infra.cli.plan.unit_costs import (
    LONG_TOKENS,
    WAITING_TOKENS,
    UnitCost,
    UnitCosts,
    by_tokens,
    more_us,
    read_costs,
    record_cost_us,
)
from infra.settings.config import duration_s
from schemas.errors import ConfigError
from schemas.topics import by_name

if TYPE_CHECKING:
    from infra.cli.plan.record_bytes import RecordBytes
    from infra.cli.settings import Settings

BUSY = 0.6  # of its core that a process is planned with: the rest catches up after an outage
DAY_S = 86_400.0
DAY_TOPIC_DAYS = 25 / 24  # a broker removes whole segments, see `schemas.topics`
ROUNDING = 1e-9  # of work that is no work: 3 / (1 / 3 * 9) may be 1.0000000000000002, and one learner does it
REPORT_S = 2.0  # of every role
BLOBS = "blobs"


class Rates(msgspec.Struct, frozen=True):
    """What comes in.

    groups: usual ones a second. requests: of people a second, each one answer. size: answers of a group. prompt,
    answer: tokens. rated: share of requests that get a word of feedback and are trained.

    Example: Rates(groups=2.0, requests=50.0, size=16, prompt=1000, answer=500, rated=0.2)
    """

    groups: float
    requests: float
    size: int
    prompt: int
    answer: int
    rated: float


class Installed(msgspec.Struct, frozen=True):
    """What the settings name.

    partitions: of a topic. copies: of each record. keep_days: of records. process, serve, explore: processes, 0 for as
    many as are needed. engine, learner: tokens a second of one engine and of the trainer, 0 where not known.

    Example: Installed(partitions=12, copies=3, keep_days=30.0, process=4, serve=2, explore=8, engine=4000.0)
    """

    partitions: int
    copies: int
    keep_days: float
    process: int = 0
    serve: int = 0
    explore: int = 0
    engine: float = 0.0
    learner: float = 0.0


class TopicNeed(msgspec.Struct, frozen=True):
    """Of one topic, in bytes. topic: its name. per_s: written by clients. per_day, kept: on the disks of all brokers,
    with all copies.
    """

    topic: str
    per_s: float
    per_day: float
    kept: float


class PartNeed(msgspec.Struct, frozen=True):
    """Of one part.

    part: its name. setting: that says how many there are. has: how many that names, 0 where it leaves that open. needs:
    how many; None where a cost is not known. share: how much of what they are planned with those do, 1 is all. unknown:
    the cost that is not known.
    """

    part: str
    setting: str
    has: int
    needs: int | None = None
    share: float | None = None
    unknown: str = ""

    @property
    def problem(self) -> str:
        """Why it would not keep up, and the setting that mends it; "" where it would."""
        if self.needs is None or not self.has or self.needs <= self.has:
            return ""
        if self.part == "trainer":
            return f"trainer: {self.share:.1f} times as fast is needed: more of {self.setting}, or a faster card"
        return f"{self.part}: {self.needs} are needed, {self.setting} = {self.has}"


class CapacityPlan(msgspec.Struct, frozen=True):
    """All of it, computed.

    rates: what comes in. there: what the settings name. topics, parts: what each needs. first: the part that is full
    first. times: with how many times these rates it is as busy as is planned. Both None where nothing is known. costs:
    that it was computed from.
    """

    rates: Rates
    there: Installed
    topics: tuple[TopicNeed, ...]
    parts: tuple[PartNeed, ...]
    first: str | None
    times: float | None
    costs: tuple[UnitCost, ...]

    @property
    def each_broker(self) -> dict[str, float]:
        """Bytes that each writes a second, and keeps, where there are as many as copies: one for each of them."""
        topics = [one for one in self.topics if one.topic != BLOBS]
        return {"per_s": sum(one.per_s for one in topics), "kept": sum(one.kept for one in topics) / self.there.copies}

    @property
    def problems(self) -> list[str]:
        """What would not keep up."""
        return [one.problem for one in self.parts if one.problem]


def run(settings: "Settings", rates: Rates, *, engine: float, learner: float, measured: Path | None) -> CapacityPlan:
    """What the rates need beside what the settings name. engine, learner: see Installed. Raises ConfigError."""
    from infra.cli.plan.record_bytes import measure

    if rates.groups <= 0 and rates.requests <= 0:
        raise ConfigError("--groups-per-s, --requests-per-s: both are 0, expected one above it")
    if measured is not None and not measured.is_dir():
        raise ConfigError(
            f"--measured: {measured} is no folder; expected one with what `headrace bench NAME --json` prints"
        )
    costs, expect = read_costs(measured), settings.expect
    there = Installed(
        partitions=settings.kafka.partitions,
        copies=settings.kafka.replication or 1,
        keep_days=duration_s(settings.keep.replay) / DAY_S,
        process=expect.process,
        serve=expect.serve,
        explore=expect.explore,
        engine=engine,
        learner=learner or (costs.learner.value if costs.learner else 0.0),
    )
    return capacity(rates, costs, measure(size=rates.size, prompt=rates.prompt, answer=rates.answer), there)


def capacity(rates: Rates, costs: UnitCosts, sizes: "RecordBytes", there: Installed) -> CapacityPlan:
    """The arithmetic."""
    workers, explorers = _workers(rates, costs, there), _explorers(rates, there)
    gateways, engines = _gateways(rates, costs, there)
    partitions = max(1, workers.needs or 0, explorers.needs or 0)
    working = (workers, gateways, engines, explorers, _trainer(rates, there))
    busiest = max((one for one in working if one.share), key=lambda one: one.share or 0.0, default=None)
    running = 2 + sum(one.has or one.needs or 0 for one in (workers, explorers, gateways))
    return CapacityPlan(
        rates=rates,
        there=there,
        topics=tuple(_topics(rates, sizes, there, running)),
        parts=(*working, PartNeed("partitions", "kafka.partitions", there.partitions, partitions)),
        first=busiest.part if busiest else None,
        times=1 / busiest.share if busiest and busiest.share else None,
        costs=tuple(costs.every()),
    )


def _workers(rates: Rates, costs: UnitCosts, there: Installed) -> PartNeed:
    """Those beyond the partitions have nothing to do. Collect of lone answers was measured on a log in memory, so that a record
    of its own comes on top.
    """
    tokens, record_us = rates.prompt + rates.answer, record_cost_us(costs)
    group_us = rates.size * (by_tokens(costs.verify, tokens) + by_tokens(costs.collect, tokens))
    lone_us = costs.alone.value + more_us(costs.verify, LONG_TOKENS, tokens)
    lone_us += costs.waits.value + more_us(costs.collect, WAITING_TOKENS, tokens) + record_us
    lone_us += rates.rated * (costs.word.value + record_us)
    busy = (rates.groups * group_us + rates.requests * lone_us) / 1e6
    return _part("stream workers", "expect.process", there.process, busy / BUSY, most=there.partitions)


def _gateways(rates: Rates, costs: UnitCosts, there: Installed) -> tuple[PartNeed, PartNeed]:
    """Their processes, and the engine that each has."""
    busy = rates.requests * (costs.request.value + rates.answer * costs.event.value) / 1e6
    gateways = _part("gateways", "expect.serve", there.serve, busy / BUSY)
    return gateways, _engines("engines of gateways", "expect.serve", there.serve, rates.requests * rates.answer, there)


def _explorers(rates: Rates, there: Installed) -> PartNeed:
    """Those beyond the partitions have nothing to do."""
    return _engines("explorers", "expect.explore", there.explore, rates.groups * rates.size * rates.answer, there)


def _engines(part: str, setting: str, has: int, tokens_per_s: float, there: Installed) -> PartNeed:
    if tokens_per_s and not there.engine:
        asked = "--engine-tokens-per-s says how many one samples"
        return PartNeed(part, setting, has, unknown=f"{tokens_per_s:,.0f} tokens a second; {asked}")
    most = there.partitions if part == "explorers" else 0
    return _part(part, setting, has, tokens_per_s / there.engine if tokens_per_s else 0.0, most=most)


def _trainer(rates: Rates, there: Installed) -> PartNeed:
    """There is one, of several ranks."""
    tokens_per_s = rates.answer * (rates.groups * rates.size + rates.requests * rates.rated)
    if tokens_per_s and not there.learner:
        asked = "--learner-tokens-per-s says how many it trains, or learner.json in --measured"
        return PartNeed("trainer", "trainer.ranks", 1, unknown=f"{tokens_per_s:,.0f} sampled tokens a second; {asked}")
    return _part("trainer", "trainer.ranks", 1, tokens_per_s / there.learner if tokens_per_s else 0.0)


def _part(part: str, setting: str, has: int, work: float, most: int = 0) -> PartNeed:
    """work: how many it keeps as busy as is planned. most: that can work at once, 0 for any number."""
    needs = math.ceil(work * (1 - ROUNDING))
    working = max(1, has or needs)
    return PartNeed(part, setting, has, needs, work / (min(working, most) if most else working))


def _topics(rates: Rates, sizes: "RecordBytes", there: Installed, running: int) -> list[TopicNeed]:
    """running: processes that report."""
    per_s: dict[str, float] = {}
    weighed: tuple[tuple[float, Mapping[str, float]], ...] = (
        (rates.groups, sizes.group), (rates.requests, sizes.answer), (rates.requests * rates.rated, sizes.word),
        (rates.requests * (1 - rates.rated), sizes.silence), (running / REPORT_S, sizes.report),
    )  # fmt: skip
    for times, found in weighed:
        for topic, num_bytes in found.items():
            per_s[topic] = per_s.get(topic, 0.0) + times * num_bytes
    return [_topic(topic, one, there) for topic, one in per_s.items() if one]


def _topic(topic: str, per_s: float, there: Installed) -> TopicNeed:
    """A blob lies in the bucket, which counts its copies itself."""
    copies, days = (1 if topic == BLOBS else there.copies), there.keep_days
    if topic != BLOBS and by_name(topic).retention == "day":
        days = DAY_TOPIC_DAYS
    per_day = per_s * DAY_S * copies
    return TopicNeed(topic, per_s, per_day, per_day * days)
