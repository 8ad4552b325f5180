"""Feedback held back: caps per rater, bursts of near duplicates; each with a reason, the same again after a rebuild."""

import asyncio
from pathlib import Path

from infra.observe.metrics import Metrics
from schemas import Feedback
from schemas.topics import PROGRESS, VERIFIED
from streams.collect.collector import Collector, CollectSettings
from streams.collect.feedback import FeedbackRules
from streams.collect.limits import BURST, RATER_CAP, held_back
from streams.collect.rules import Rules
from tests.streams.collect.collecting import DEADLINE_MS, FakePartition, answer, block, decisions, drops, folded, said
from tests.streams.deliveries import memory_log, stored, values

WITHIN_MS = 1_000
WORDS = "The answer was rude and did not help me with my order at all, please fix it."


def source(**limits: int) -> FeedbackRules:
    return FeedbackRules(window_ms=100_000, late="amend", within_ms=WITHIN_MS, **limits)  # type: ignore[arg-type]


def rules(**limits: int) -> Rules:
    return Rules(deadline_ms=DEADLINE_MS, keep_ms=10_000_000, sources={"csat": source(**limits)})


def ref(number: int) -> str:
    return f"a{number}.0.0-0-0"


def rated(number: int, rater: str = "bot") -> FakePartition:
    """So many answers, each rated once by the same rater."""
    inbox = FakePartition().extend(block(answer(f"a{index}.0", 0, size=1, lane="live")) for index in range(number))
    return inbox.extend(said(ref(index), 1.0, id=str(index), rater=rater) for index in range(number))


def label(number: int, text: str, rater: str = "") -> Feedback:
    return Feedback(ref=ref(number), id=f"{number}-{rater}", source="csat", type="label", text=text, rater=rater)


def reasons(words: list[Feedback], step_ms: int = 1, **limits: int) -> list[str]:
    memories: dict = {}
    return [held_back(memories, one, source(**limits), number * step_ms) for number, one in enumerate(words)]


def test_what_one_rater_says_beyond_the_cap_counts_for_nothing_and_is_counted() -> None:
    results = folded(rated(5), rules(per_rater=3))
    assert len(decisions(results)) == 3
    assert drops(results) == {RATER_CAP: 2}


def test_raters_do_not_share_a_cap_and_all_that_nobody_is_named_for_is_one_raters() -> None:
    assert drops(folded(rated(5, rater=""), rules(per_rater=3))) == {RATER_CAP: 2}
    others = [said(ref(number), 1.0, rater=f"r{number}") for number in range(5)]
    assert reasons(others, per_rater=1) == [""] * 5


def test_the_cap_is_lifted_when_its_time_is_over() -> None:
    words = [said(ref(number), 1.0, rater="bot") for number in range(4)]
    assert reasons(words, step_ms=WITHIN_MS // 2, per_rater=1) == ["", RATER_CAP, "", RATER_CAP]


def test_raters_of_two_tenants_that_have_one_name_do_not_share_a_cap() -> None:
    memories: dict = {}
    words = [said(ref(number), 1.0, id=str(number), rater="ann") for number in range(4)]
    tenants = ("acme", "acme", "other", "other")
    held = [
        held_back(memories, one, source(per_rater=1), 0, tenant) for one, tenant in zip(words, tenants, strict=True)
    ]
    assert held == ["", RATER_CAP, "", RATER_CAP]


def test_a_retraction_is_never_held_back() -> None:
    back = [said(ref(0), 0.0, id=str(number), rater="bot", type="retraction") for number in range(5)]
    assert reasons(back, per_rater=1, alike=1) == [""] * 5


def test_the_same_words_with_small_changes_are_a_burst_whoever_says_them() -> None:
    said_so = [label(number, f"{WORDS} {'!' * number}", rater=f"r{number}") for number in range(4)]
    said_so.insert(2, label(9, "It is fine, though the second paragraph could name the price.", "ann"))
    assert reasons(said_so, alike=2) == ["", "", "", BURST, BURST]


def test_feedback_without_words_is_no_burst() -> None:
    assert reasons([said(ref(number), 1.0) for number in range(9)], alike=1) == [""] * 9


def test_repeated_delivery_does_not_use_up_a_cap() -> None:
    once = said(ref(0), 1.0, id="x", rater="bot")
    inbox = FakePartition().extend([block(answer("a0.0", 0, size=1, lane="live")), once, once, once])
    assert not drops(folded(inbox, rules(per_rater=1)))


def test_what_is_held_back_leaves_no_group_open() -> None:
    inbox = FakePartition().extend([said("gone.0.0-0-0", 1.0, id=str(number), rater="bot") for number in range(3)])
    assert drops(folded(inbox, rules(per_rater=1))) == {RATER_CAP: 2}


def test_a_rebuilt_worker_holds_back_the_same(tmp_path: Path) -> None:
    async def run() -> None:
        async with memory_log() as log:
            for arrival in rated(6).arrivals:
                assert arrival.value is not None
                await log.publish(VERIFIED, arrival.value)
            for number, message in enumerate(await stored(log, VERIFIED)):
                # A folder of its own each time: everything before is rebuilt from the log.
                settings = CollectSettings(tmp_path / str(number), rules(per_rater=3), ())
                collector = Collector(log, Metrics("process"), 0, settings)
                await collector.recover(message.offset, lambda: False)
                await collector.take([message.record])
                collector.close()
            assert len(await values(log, PROGRESS)) == 3

    asyncio.run(run())
