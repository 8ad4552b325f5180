"""Needs of given rates: bytes of each topic on the brokers' disks, and processes, from unit costs that benchmarks measured.

Processor time is of one core: a process of headrace uses little more. Tokens a second of an engine and of the trainer depend on
model and card, so the user states them. Unit costs lie in `unit_costs.json`, which `make bench NAME=… ARGS=--save` writes.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from infra.cli.settings import Settings
from infra.settings.config import duration_s
from schemas.topics import by_name

COSTS = Path(__file__).with_name("unit_costs.json")
BUSY = 0.6  # of its core that a process is planned with: the rest catches up after an outage
DAY_S = 86_400.0
DAY_TOPIC_DAYS = 25 / 24  # a broker removes whole segments, see `schemas.topics`
ROUNDING = 1e-9  # 3 / (1 / 3 * 9) may be 1.0000000000000002, and one learner does it
REPORT_S = 2.0  # of every role
SHORT_TOKENS, LONG_TOKENS, WAITING_TOKENS = 11, 700, 120  # of the answers, with their prompts, that the costs are of
IN_A_RECORD = 16  # answers, of the cost of one in a group


class UnitCost(msgspec.Struct, frozen=True):
    """A measured cost. source: Command and date."""

    value: float
    unit: str
    source: str


class RateFlags(msgspec.Struct, frozen=True):
    """Incoming rates, and speeds of one engine and of the trainer."""

    groups_per_s: Annotated[float, typer.Option(min=0, help="Groups that explorers sample per second.")] = 0.0
    requests_per_s: Annotated[float, typer.Option(min=0, help="Requests that gateways answer per second.")] = 0.0
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, including earlier turns.")] = 1000
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 500
    rated: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that get feedback.")] = 0.2
    engine_tokens_per_s: Annotated[
        float, typer.Option(min=0, help="Tokens that an engine samples per second, as tokens_per_s of an explorer.")
    ] = 0.0
    learner_tokens_per_s: Annotated[
        float,
        typer.Option(min=0, help="Sampled tokens that the trainer trains per second; see make bench NAME=learner."),
    ] = 0.0


class PartNeed(msgspec.Struct, frozen=True):
    """Need of one kind of process.

    setting: Setting that says how many there are. has: How many it names, 0 for open. needs: None where a cost is unknown.
    share: Work divided by the capacity of the planned processes, 1 is all of it. unknown: Missing cost. problem: Why the part
    would not keep up, and the setting that fixes it; "" where it would.
    """

    part: str
    setting: str
    has: int
    needs: int | None = None
    share: float | None = None
    unknown: str = ""
    problem: str = ""


class TopicNeed(msgspec.Struct, frozen=True):
    """Bytes a second without copies, and on the disks of all brokers, with all copies, in a day and in the long run."""

    per_s: float
    day: float
    kept: float


class RatesPlan(msgspec.Struct, frozen=True):
    """Needs of the rates. broker: Bytes that each broker writes a second and keeps, with as many brokers as copies. busiest:
    The part that is full first, among parts with a known share.
    """

    topics: dict[str, TopicNeed]
    broker: TopicNeed
    parts: tuple[PartNeed, ...]
    busiest: PartNeed | None


def read_costs() -> dict[str, UnitCost]:
    """Unit costs by name."""
    return msgspec.json.decode(COSTS.read_bytes(), type=dict[str, UnitCost])


def plan_rates(rates: RateFlags, settings: Settings, costs: dict[str, UnitCost]) -> RatesPlan:
    us = {name: cost.value for name, cost in costs.items()}
    expect, copies = settings.expect, settings.kafka.replication or 1
    served_s = rates.requests_per_s * (us["request"] + rates.answer * us["event"]) / 1e6
    sampled = rates.groups_per_s * settings.master.num_episodes * rates.answer
    served = rates.requests_per_s * rates.answer
    trained = sampled + served * rates.rated
    most, engine, learner = settings.kafka.partitions, "--engine-tokens-per-s", "--learner-tokens-per-s"
    workers = _part("stream workers", "expect.process", expect.process, _worker_s(rates, settings, us) / BUSY, most)
    gateways = _part("gateways", "expect.serve", expect.serve, served_s / BUSY)
    speed, trainer = rates.engine_tokens_per_s, rates.learner_tokens_per_s
    explorers = _sampling("explorers", "expect.explore", expect.explore, sampled, speed, engine, most)
    partitions = max(1, workers.needs or 0, explorers.needs or 0)
    parts = (
        workers, gateways,
        _sampling("engines of gateways", "expect.serve", expect.serve, served, speed, engine), explorers,
        _sampling("trainer", "trainer.ranks", 1, trained, trainer, learner),
        PartNeed(
            "partitions", "kafka.partitions", most, partitions,
            problem=f"partitions: {partitions} are needed, kafka.partitions = {most}" if partitions > most else "",
        ),
    )  # fmt: skip
    running = 2 + sum(part.has or part.needs or 0 for part in (workers, explorers, gateways))
    topics = _topics(rates, settings, us, running)
    whole = TopicNeed(*(sum(getattr(need, field) for need in topics.values()) for field in ("per_s", "day", "kept")))
    broker = TopicNeed(whole.per_s, whole.day / copies, whole.kept / copies)
    busiest = max((part for part in parts if part.share), key=lambda part: part.share or 0.0, default=None)
    return RatesPlan(topics, broker, parts, busiest)


def keep_days(settings: Settings) -> float:
    return duration_s(settings.keep.replay) / DAY_S


def _worker_s(rates: RateFlags, settings: Settings, us: dict[str, float]) -> float:
    """CPU seconds a second of verify and collect. Collect of lone answers was measured on a log in memory: the cost of a
    separate record is added, from the difference of verify between a lone answer and an answer in a record of 16.
    """
    tokens = rates.prompt + rates.answer
    record = max(0.0, us["verify_alone"] - us["verify_long"]) * IN_A_RECORD / (IN_A_RECORD - 1)

    def more(stage: str, measured: int) -> float:
        slope = max(0.0, us[f"{stage}_long"] - us[f"{stage}_short"]) / (LONG_TOKENS - SHORT_TOKENS)
        return slope * max(0, tokens - measured)

    grouped = sum(us[f"{stage}_short"] + more(stage, SHORT_TOKENS) for stage in ("verify", "collect"))
    lone = us["verify_alone"] + more("verify", LONG_TOKENS)
    lone += us["answer_waits"] + more("collect", WAITING_TOKENS) + record
    lone += rates.rated * (us["feedback_joined"] + record)
    return (rates.groups_per_s * settings.master.num_episodes * grouped + rates.requests_per_s * lone) / 1e6


def _sampling(
    part: str, setting: str, has: int, tokens_per_s: float, speed: float, option: str, most: int = 0
) -> PartNeed:
    if tokens_per_s and not speed:
        return PartNeed(part, setting, has, unknown=f"{tokens_per_s:,.0f} tokens a second: {option}")
    return _part(part, setting, has, tokens_per_s / speed if tokens_per_s else 0.0, most)


def _part(part: str, setting: str, has: int, work: float, most: int = 0) -> PartNeed:
    """work: How many it keeps as busy as is planned. most: How many can work at once, 0 for any number."""
    needs = math.ceil(work * (1 - ROUNDING))
    working = max(1, has or needs)
    share = work / (min(working, most) if most else working)
    problem = f"{part}: {needs} are needed, {setting} = {has}"
    if part == "trainer":
        problem = f"trainer: {share:.1f} times as fast is needed: more of {setting}, or a faster card"
    return PartNeed(part, setting, has, needs, share, problem=problem if has and needs > has else "")


def _topics(rates: RateFlags, settings: Settings, costs: dict[str, float], running: int) -> dict[str, TopicNeed]:
    """Costs named bytes.KIND.TOPIC.PER are bytes of a record kind, once and per member, prompt and token."""
    counts = {
        "group": (rates.groups_per_s, settings.master.num_episodes), "answer": (rates.requests_per_s, 1),
        "rating": (rates.requests_per_s * rates.rated, 1), "unrated": (rates.requests_per_s * (1 - rates.rated), 1),
        "report": (running / REPORT_S, 1),
    }  # fmt: skip
    found: dict[str, float] = {}
    for name, num_bytes in costs.items():
        if name.startswith("bytes."):
            _, kind, topic, per = name.split(".")
            per_s, members = counts[kind]
            times = {"once": 1, "member": members, "prompt": rates.prompt, "token": members * rates.answer}[per]
            found[topic] = found.get(topic, 0.0) + per_s * times * num_bytes
    days = {topic: DAY_TOPIC_DAYS if by_name(topic).retention == "day" else keep_days(settings) for topic in found}
    daily = {topic: per_s * DAY_S * (settings.kafka.replication or 1) for topic, per_s in found.items() if per_s}
    return {topic: TopicNeed(found[topic], day, day * days[topic]) for topic, day in daily.items()}


def rate_tables(
    rates: RateFlags, settings: Settings, plan: RatesPlan, costs: dict[str, UnitCost]
) -> Iterator[Table | str]:
    broker, num = plan.broker, settings.kafka.replication or 1
    groups = f"{rates.groups_per_s:g} groups of {settings.master.num_episodes}"
    asked = f"{groups}, {rates.requests_per_s:g} requests a second (computed)"
    topics = Table("topic", title=asked)
    copies = f"{num} cop{'y' if num == 1 else 'ies'}"
    for title in ("written", f"a day, {copies}", f"kept, {keep_days(settings):g} days"):
        topics.add_column(title, justify="right")
    for topic, need in plan.topics.items():
        topics.add_row(topic, f"{need.per_s / 1e3:,.1f} kB/s", gb(need.day), gb(need.kept))
    yield topics
    processes = Table(
        "part", "needs", "has", "setting", "busy", title=f"processes, planned to be {BUSY:.0%} busy (computed)"
    )
    for part in plan.parts:
        needs = f"unknown: {part.unknown}" if part.needs is None else str(part.needs)
        busy = "" if part.share is None else f"{part.share:.0%} of the plan"
        style = "red" if part.problem else ""
        processes.add_row(part.part, needs, str(part.has or "open"), part.setting, busy, style=style)
    yield processes
    writes = f"each of {num} writes {broker.per_s / 1e3:,.1f} kB/s and keeps {gb(broker.kept)}"
    yield f"brokers: {num} at least, one a copy; {writes}"
    if plan.busiest is not None:
        among = ", of the known parts" if any(part.unknown for part in plan.parts) else ""
        yield f"full first{among}: {plan.busiest.part}, at {1 / (plan.busiest.share or 1):.3g} times these rates"
    unit_costs = Table("unit cost", "value", "measured by", title="computed from")
    for name, cost in costs.items():
        if not name.startswith("bytes."):
            unit_costs.add_row(name, f"{cost.value:,.1f} {cost.unit}", cost.source)
    yield unit_costs


def gb(num_bytes: float) -> str:
    """Bytes in MB or GB.

    >>> gb(16_381_470_720), gb(5_000_000)
    ('16.4 GB', '5.0 MB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"
