"""Who spoke within the last hour is found by reading little of it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from infra.cli.look.expected import Heard, missing
from infra.cli.look.heard import CELL_MS, MARK, LastHour
from infra.cli.look.newest import newest
from infra.cli.look.status import GONE_S, read_status
from infra.log.bus import Record
from infra.log.follower import Follower
from infra.log.log import Log
from infra.log.memory import MemoryBus
from schemas import Progress, topics

NOW_S = 1_763_719_200
EVERY_S = 5
LIVE = 60  # records that are read whole

# Of a process: when it began and ended, in seconds of the two hours up to now, and what it said last.
lives = st.tuples(st.integers(0, 7200), st.integers(0, 7200), st.sampled_from(["stopped", "failed", "running"])).map(
    lambda life: (min(life[:2]), max(life[:2]), life[2])
)


class CountingFollower(Follower):
    """Counts the records it hands out."""

    num_read = 0

    async def chunks(self, *args: Any, **kwargs: Any) -> AsyncGenerator[list[Record], None]:
        async for records in super().chunks(*args, **kwargs):
            self.num_read += len(records)
            yield records


async def filled(processes: list[tuple[int, int, str]]) -> tuple[Log, dict[str, Heard]]:
    """A log in which each spoke every EVERY_S seconds while it lived, beside a master that lives on; and what each said."""
    now_ms = [0]
    log = Log(MemoryBus(lambda: now_ms[0]), "t")
    await log.create_topics(partitions=1, keep_ms=-1)
    said: list[tuple[float, Progress]] = []
    for at, (begin_s, end_s, last) in enumerate([*processes, (0, 7200, "running")]):
        role = "explore" if at < len(processes) else "master"
        report = Progress(role=role, instance=f"{role}/vm/{at}", state="running", reason="")
        times = [*range(begin_s, end_s, EVERY_S), end_s]
        said += [(second, report) for second in times[:-1]]
        said.append((end_s, Progress(role=role, instance=report.instance, state=last)))
    truth: dict[str, Heard] = {}
    for second, report in sorted(said, key=lambda one: one[0]):
        at_s = NOW_S - 7200 + second
        now_ms[0] = at_s * 1000
        await log.publish(topics.REPORTS, report)
        first_s = truth[report.instance].first_s if report.instance in truth else at_s
        truth[report.instance] = Heard(report.role, report.instance, report.state, first_s, at_s)
    return log, truth


def heard_of(processes: list[tuple[int, int, str]], looks: int = 1) -> tuple[dict[str, Heard], dict[str, Heard], int]:
    async def main() -> tuple[dict[str, Heard], dict[str, Heard], int]:
        log, truth = await filled(processes)
        follower = CountingFollower(log, (topics.REPORTS,))
        hour = LastHour(log, follower)
        for _ in range(looks):
            found = await hour.heard(await newest(log, topics.REPORTS, LIVE))
        await follower.close()
        return {one.instance: one for one in found}, truth, follower.num_read

    return asyncio.run(main())


@settings(max_examples=25, deadline=None)
@given(st.lists(lives, max_size=5))
@example([(0, 7000, "stopped"), (0, 7001, "failed"), (3700, 7199, "running")])
def test_what_each_process_of_the_hour_said_last_is_found(processes: list[tuple[int, int, str]]) -> None:
    found, truth, _ = heard_of(processes)
    mark_s = MARK * CELL_MS / 1000
    for name, one in truth.items():
        lived_s, ended_s_ago = one.last_s - one.first_s, NOW_S - one.last_s
        if ended_s_ago < 3600 - mark_s and lived_s > mark_s + CELL_MS / 1000:
            assert (found[name].state, found[name].last_s) == (one.state, one.last_s)
            since_s = max(one.first_s, NOW_S - 3600)
            assert one.first_s <= found[name].first_s <= since_s + mark_s + CELL_MS / 1000


def test_a_tenth_of_an_hour_is_read_and_a_second_look_reads_nothing() -> None:
    living = [(0, 7200, "running")] * 20
    found, _, num_read = heard_of(living)
    spoken = 21 * 3600 // EVERY_S
    assert len(found) == 21 and num_read < spoken / 10
    assert heard_of(living, looks=3)[2] == num_read
    _, _, with_one_gone = heard_of([*living, (0, 5555, "stopped")])
    assert with_one_gone < num_read + 6 * 21 * (CELL_MS / 1000 / EVERY_S + 1)


def test_a_process_that_died_before_the_newest_records_is_missed_and_one_that_stopped_is_not() -> None:
    def lines(last: str) -> list[str]:
        async def main() -> list[str]:
            log, _ = await filled([(0, 7200, "running")] * 3 + [(0, 5000, last)])
            wanted = {"explore": 0}
            heard = await LastHour(log).heard(await newest(log, topics.REPORTS, LIVE))
            state = await read_status(log, now_s=NOW_S, max_lag=1, wanted=wanted)
            assert state["missing"] == missing(wanted, heard, NOW_S, GONE_S)
            return list(state["missing"])

        return asyncio.run(main())

    assert lines("running") == ["3 of 4 explore run: explore/vm/3 was last heard of 2200 s ago"]
    assert lines("stopped") == []
