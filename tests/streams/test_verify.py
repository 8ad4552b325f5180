"""verify: whoever goes in comes out, as a member, as a stub, or as an eval answer."""

import asyncio

import msgspec

from infra.chain.chain import make_step
from infra.chain.processor import Drop, processor
from infra.log.bus import Record
from infra.log.log import LogMessage
from schemas import BadFrame, Block, DeadLetter, DropMarker, Experience, Tick, encode
from schemas.topics import DEAD_LETTERS, EVALS, VERIFIED
from streams.processors.filter import dedupe
from streams.stages.stage import Handled
from streams.stages.verify import Verifier
from tests.streams.collect.collecting import answer, block


@processor(version=1, inline=True)
def even_only(experience: Experience) -> Experience | Drop:
    return Drop("odd") if experience.episode % 2 else experience


def message_of(value: object, offset: int = 0, error: BadFrame | None = None) -> LogMessage:
    frame = encode(value) if value is not None else b"??"  # type: ignore[arg-type]
    record = Record("app.experiences", 0, offset, 1_000, b"t.0", frame)
    return LogMessage(record, value=value, error=error)  # type: ignore[arg-type]


def handled(value: object, *steps: object) -> Handled:
    verifier = Verifier([make_step(function.__name__, function) for function in steps])  # type: ignore[attr-defined,arg-type]
    return asyncio.run(verifier.handle(message_of(value)))


def test_kept_members_go_on_in_one_block_and_dropped_ones_leave_a_stub() -> None:
    result = handled(block(*(answer("t.0", episode, size=4) for episode in range(4))), even_only)
    (kept,) = result.first
    assert kept.topic is VERIFIED
    assert isinstance(kept.record, Block)
    assert [one.episode for one in kept.record.experiences] == [0, 2]
    stubs = [output.record for output in result.then]
    assert stubs == [
        DropMarker(
            id=f"t.0.0-{n}-0",
            group="t.0",
            episode=n,
            group_size=4,
            reason="odd",
            stage="verify",
            processor="even_only@1",
        )
        for n in (1, 3)
    ]
    assert result.dropped == {"odd": 2}


def test_a_block_whose_members_are_all_dropped_sends_stubs_only() -> None:
    result = handled(block(answer("t.0", 1)), even_only)
    assert result.first == ()
    assert [type(output.record) for output in result.then] == [DropMarker]


def test_a_duplicate_is_counted_and_closes_nobodys_place() -> None:
    verifier = Verifier([make_step("dedupe", dedupe)])
    sent = block(answer("t.0", 0))
    first = asyncio.run(verifier.handle(message_of(sent, offset=3)))
    retried = asyncio.run(verifier.handle(message_of(sent, offset=3)))
    second = asyncio.run(verifier.handle(message_of(sent, offset=4)))
    assert first.first == retried.first
    assert (second.first, second.then, second.dropped) == ((), (), {"duplicate": 1})


def test_eval_answers_go_to_evals_and_are_never_dropped() -> None:
    members = [msgspec.structs.replace(answer("t.0", episode), suite="held-out") for episode in range(2)]
    result = handled(block(*members), even_only)
    (output,) = result.first
    assert output.topic is EVALS
    assert isinstance(output.record, Block)
    assert [one.failure for one in output.record.experiences] == ["", "odd"]
    assert output.record.experiences[1].scores == ()
    assert result.then == ()


def test_bad_frames_and_strange_records_are_dead_lettered() -> None:
    bad = asyncio.run(Verifier([]).handle(message_of(None, error=BadFrame("header: checksum differs"))))
    strange = asyncio.run(Verifier([]).handle(message_of(Tick(partition=0, due_ms=1))))
    letters = [output.record for result in (bad, strange) for output in result.then]
    assert [output.topic for result in (bad, strange) for output in result.then] == [DEAD_LETTERS, DEAD_LETTERS]
    assert [one.reason for one in letters if isinstance(one, DeadLetter)] == ["bad frame", "unexpected record"]
    assert "checksum" in letters[0].error  # type: ignore[union-attr]


def test_members_of_a_record_that_failed_as_a_whole_leave_stubs() -> None:
    message = message_of(block(answer("t.0", 0), answer("t.0", 1)))
    result = Verifier([]).failed(message, "record too large", "9 MB")
    assert [type(output.record) for output in result.then] == [DropMarker, DropMarker, DeadLetter]
    assert result.dropped == {"record too large": 2}
