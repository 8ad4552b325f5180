"""Draining an app: the master issues nothing new, outstanding groups are finished, and then nothing may be pending.

    Directive(drain) in policies ─> master: draining … drained ─> account until nothing is on its way

The directive lies in the log, so it outlives every process; Directive(continue) takes it back. Demonstrations that wait in the
buffer to be drawn stay there, and production traffic goes on.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing

import msgspec

from infra.ledger.account import Account
from infra.ledger.audit import audit
from infra.log.log import Log
from schemas import Directive, Progress
from schemas.topics import POLICIES, REPORTS

AGAIN_S = 1.0
MAX_AGAIN_S = 15.0


class Draining(msgspec.Struct, frozen=True):
    """Progress of a drain. state: of the master, "" before its answer. outstanding: groups. on_the_way: experiences, -1 before
    the first account.

    Example: Draining(state="draining", outstanding=17)
    """

    state: str = ""
    outstanding: int = 0
    on_the_way: int = -1


OnDraining = Callable[[Draining], None]


async def drain(log: Log, run: str, owner: str, timeout_s: float, on_draining: OnDraining) -> Account:
    """Drain and account for everything; experiences still on their way at the timeout are in the account."""
    _, reports_end = await log.bounds(REPORTS)
    order = await log.publish(POLICIES, Directive(order="drain", owner=owner))
    ends_s = time.monotonic() + timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await _master_drained(log, reports_end, order.offset, on_draining)
    except TimeoutError:
        return await audit(log, run)
    again_s = AGAIN_S
    while True:
        account = await audit(log, run)
        on_draining(Draining(state="drained", on_the_way=account.on_the_way))
        if not account.on_the_way or time.monotonic() + again_s > ends_s:
            return account
        await asyncio.sleep(again_s)  # stragglers of superseded attempts, on their way through verify and collect
        again_s = min(2 * again_s, MAX_AGAIN_S)


async def go_on(log: Log, owner: str) -> None:
    """Let a drained app issue again."""
    await log.publish(POLICIES, Directive(order="continue", owner=owner))


async def _master_drained(log: Log, start: Mapping[int, int], drain: int, on_draining: OnDraining) -> None:
    """Wait until a master that has read the directive at offset `drain` reports that nothing is outstanding."""
    async with aclosing(log.tail(REPORTS, start)) as messages:
        async for message in messages:
            report = message.value
            if not isinstance(report, Progress) or report.master is None or report.master.drained_to < drain:
                continue  # an older master, or one that has not read it yet
            on_draining(Draining(report.master.state, report.master.outstanding))
            if report.master.is_drained:
                return
