"""The counters of the flow page: labels are added up and the largest is named, in words, and no page grows with them."""

import asyncio
from collections import deque
from pathlib import Path

from infra.cli.console.rates import IN_PULSE, IN_TABLE, Doing, doings, together
from infra.cli.console.reading import beat
from infra.log.log import Log
from infra.log.memory import MemoryBus, wall_ms
from infra.store.memory import MemoryStore
from schemas import Progress, topics
from tests.infra.cli.console_rig import looking
from tests.infra.cli.test_console_flow import role
from tests.infra.cli.test_console_pages import text_of

RATES = {
    "requests{route=/v1/chat/completions,status=200}": 2.5, "requests{route=/v1/models,status=200}": 0.5,
    "answers{end=whole}": 2.0, "recorded": 2.0, "step_seconds": 0.9, "shed{reason=full}": 0.0, "of_a_plugin": 1.0,
}  # fmt: skip


def test_labels_are_added_up_and_the_largest_is_named_in_words() -> None:
    found, more = doings("serve", RATES, IN_TABLE)
    meanings = {one.name: one.meaning for one in found}
    assert more == 0 and meanings["requests"] == "requests by route and status" and meanings["of_a_plugin"] == ""
    assert [(one.words, one.per_s, one.of) for one in found] == [
        ("requests", 3.0, "most route /v1/chat/completions, status 200, 2.5"), ("answers", 2.0, "end whole"),
        ("recorded", 2.0, ""), ("of a plugin", 1.0, ""),
    ], "in the order of the metrics; what stands still and what is time is left out"  # fmt: skip


def test_however_many_counters_a_role_has_a_page_shows_a_number_of_them_and_says_how_many_more() -> None:
    rates = {f"counter_{at:03}": 1.0 for at in range(300)} | {f"many{{label={at}}}": 1.0 for at in range(300)}
    found, more = doings("serve", rates, IN_TABLE)
    assert len(found) == IN_TABLE and more == 301 - IN_TABLE
    (many,) = [one for one in doings("serve", rates, 400)[0] if one.name == "many"]
    assert many == Doing("many", "", 300.0, "most label 0, 1")


def test_of_all_processes_of_a_kind_that_run_the_counters_are_one() -> None:
    rates = {"answers{end=whole}": 2.0}
    roles = [role("serve", rates=rates), role("serve", rates=rates), role("serve", rates=rates, silent=True)]
    assert together([*roles, role("train", rates=rates, state="stopped")]) == {"serve": {"answers{end=whole}": 4.0}}


def test_a_line_of_the_pulse_goes_down_with_its_counter_and_goes_with_its_role() -> None:
    pulse: dict[str, deque[float]] = {}
    for rates in ({"answers{end=whole}": 2.0, "answers{end=broken off}": 1.0}, {"answers{end=whole}": 0.0}):
        beat(pulse, [role("serve", rates=rates)])
    assert {name: [*values] for name, values in pulse.items()} == {"serve/answers": [3.0, 0.0]}
    beat(pulse, [role("serve", silent=True, rates={"answers{end=whole}": 2.0})])
    assert not pulse


def test_the_flow_page_shows_labelled_counters_of_each_process_and_of_each_kind(tmp_path: Path) -> None:
    ago_ms = [40_000]

    async def main() -> None:
        log = Log(MemoryBus(lambda: wall_ms() - ago_ms[0]), "t", store=MemoryStore())
        await log.create_topics(partitions=1, keep_ms=-1)
        extra = [f"a_plugin_counts_{at}" for at in range(IN_PULSE)]
        for told in (0.0, 60.0):
            for name in ("serve/1", "serve/2"):
                counters = {"answers{end=whole}": told, "answers{end=broken off}": told / 4} | dict.fromkeys(
                    extra, told
                )
                report = Progress(role="serve", instance=name, state="serving", counters=counters)
                await log.publish(topics.REPORTS, report)
            ago_ms[0] -= 30_000
        async with looking(tmp_path, log) as (client, _):
            whole = text_of(await client.get("/"))
            assert "answers 2.5 most end whole, 2" in whole, "of one process"
            assert "serve: answers most end whole, 4" in whole, "of both"
            assert "1 more counter is under Roles." in whole

    asyncio.run(main())
