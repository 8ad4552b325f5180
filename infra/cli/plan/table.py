"""What `headrace plan` says, as a person reads it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from infra.cli.plan.plan import BLOBS, BUSY, CapacityPlan

if TYPE_CHECKING:
    from rich.console import RenderableType


def shown(plan: CapacityPlan) -> list["RenderableType"]:
    """Topics, parts, what is full first, and where each cost was had."""
    return [_topics(plan), _parts(plan), *_words(plan), _costs(plan)]


def _topics(plan: CapacityPlan) -> Table:
    rates, copies = plan.rates, plan.there.copies
    table = Table(
        "topic", title=f"{rates.groups:g} groups of {rates.size}, {rates.requests:g} requests a second (computed)"
    )
    named = f"{copies} cop{'y' if copies == 1 else 'ies'}"
    for title in ("written", f"a day, {named}", f"kept, {plan.there.keep_days:g} days"):
        table.add_column(title, justify="right")
    for one in plan.topics:
        name = "blobs, in the store" if one.topic == BLOBS else one.topic
        table.add_row(name, f"{one.per_s / 1e3:,.1f} kB/s", _gb(one.per_day), _gb(one.kept))
    totals = [sum(getattr(one, name) for one in plan.topics) for name in ("per_s", "per_day", "kept")]
    table.add_row("in all", f"{totals[0] / 1e3:,.1f} kB/s", _gb(totals[1]), _gb(totals[2]), style="bold")
    return table


def _parts(plan: CapacityPlan) -> Table:
    table = Table("part", title=f"processes, planned to be {BUSY:.0%} busy (computed)")
    for title in ("needs", "has"):
        table.add_column(title, justify="right")
    table.add_column("setting")
    table.add_column("busy", justify="right")
    for one in plan.parts:
        style = "red" if one.problem else ""
        needs = "?" if one.needs is None else str(one.needs)
        busy = one.unknown or ("" if one.share is None else f"{one.share:.0%} of what is planned")
        table.add_row(one.part, Text(needs, style=style), str(one.has or "open"), one.setting, busy)
    return table


def _words(plan: CapacityPlan) -> Iterator[Text]:
    copies, each = plan.there.copies, plan.each_broker
    written = f"each of {copies} writes {each['per_s'] / 1e3:,.1f} kB/s and keeps {_gb(each['kept'])}"
    yield Text(f"brokers: {copies} at least, one a copy; {written}")
    if plan.first is not None and plan.times is not None:
        among = ", of what is known" if any(one.unknown for one in plan.parts) else ""
        yield Text(f"full first{among}: {plan.first}, at {number(round(plan.times, 2))} times these rates")
    for one in plan.problems:
        yield Text(f"will not keep up: {one}", style="red")


def _costs(plan: CapacityPlan) -> Table:
    table = Table("unit cost", title="measured; bytes are of records made here, at these lengths")
    table.add_column("value", justify="right")
    table.add_column("by")
    for one in plan.costs:
        table.add_row(one.what, f"{number(round(one.value, 1))} {one.unit}", one.source)
    return table


def _gb(num_bytes: float) -> str:
    """As a person reads it.

    >>> _gb(16_381_470_720), _gb(5_000_000)
    ('16.4 GB', '5.0 MB')
    """
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def number(value: float) -> str:
    """Whole from 100 on, else three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
