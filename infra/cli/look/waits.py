"""Next event of an answer and its deadline: by its records and the settings, with the rules of collect and the trainer."""

from infra.cli.settings import Settings
from infra.cli.terminal import clock
from infra.ledger.trace import AnswerTrace
from infra.settings.config import duration_s
from schemas import DropMarker, Experience, Feedback
from schemas.ids import group_of
from streams.collect.feedback import answer_of, is_labelled, take_feedback
from streams.collect.group import AnswerFeedback, Attempt, BlockPlace, Group, LoggedFeedback
from streams.collect.rules import Rules, due_ms
from streams.collect.turns import NO_TURN, depth_of
from streams.worker import rules_of
from trainer.batch.assemble import PACED

Arrivals = tuple[tuple[int, Experience | DropMarker | Feedback], ...]


def waits_for(answer: AnswerTrace, settings: Settings, now_ms: int) -> str:
    """A clause about an answer that no published version has learned from: what comes next; "" where nothing does."""
    lasting = [use for use in answer.uses if not use.undone]
    if answer.first_version is not None or answer.dropped:
        return ""
    if lasting:
        return f"the version behind step {lasting[-1].step} is not published yet"
    if answer.given_up:
        return f"the trainer took it out: {answer.given_up}"
    ended = [closure for _, closure in answer.closures if closure.outcome != "superseded"]
    if ended:
        return waits_for_step(answer, settings) if ended[-1].outcome == "buffered" and answer.buffered else ""
    if answer.judged is None:
        return "it waits to be verified and scored by process"
    if any(closure.attempt == answer.judged.attempt for _, closure in answer.closures):
        return ""
    return waits_for_close(answer.judged, answer.arrived, rules_of(settings, settings.streams()), now_ms)


def waits_for_step(answer: AnswerTrace, settings: Settings) -> str:
    lane, lanes = answer.buffered[-1][1].lane, settings.trainer.lanes
    if lane not in lanes or lanes[lane].weight == 0.0:
        return f"no lane takes it: [trainer.lanes] has {', '.join(lanes)}, and it is of lane {lane}"
    if PACED in lanes:
        return f"it waits in the trainer's buffer for a step of lane {lane}"
    least, every = settings.trainer.min_sequences(lane), settings.trainer.publish_interval
    of = f" of {least} answers or more" if least > 1 else ""
    apart = f", {every} after the last version at the earliest" if duration_s(every) > 0 else ""
    return f"it waits in the trainer's buffer for a step of lane {lane}{of}{apart}"


def waits_for_close(judged: Experience, arrived: Arrivals, rules: Rules, now_ms: int) -> str:
    group = group_as_it_is(judged, arrived)
    until_ms = due_ms(group, rules)
    until = f"until {clock(until_ms)}"
    if group.winner < 0:
        return f"it waits for the rest of its group {until}"
    known = [record.id for _, record in arrived if isinstance(record, Experience) and record.attempt == group.winner]
    silent = [
        name
        for name, source in rules.sources.items()
        if not all(is_labelled(group.feedback.get(each_known), {name: source}) for each_known in known)
    ]
    if judged.lane in rules.waiting and silent and until_ms > now_ms:
        return f"it waits for {' and '.join(silent)} {until}"
    if depth_of(judged) != NO_TURN and rules.session_ms:
        return f"it waits for the rest of its session, until none of it came for {rules.session_ms / 1000:g} s"
    return "it is closed by process with the next record it reads"


def group_as_it_is(judged: Experience, arrived: Arrivals) -> Group:
    """Collect's state of the group, from its records in `verified`, in their order; the attempt is that of the answer."""
    group, number = Group(group_of(judged.id)), judged.attempt
    for place, (time_ms, record) in enumerate(arrived):
        if isinstance(record, Feedback):
            on_answer = group.feedback.setdefault(answer_of(record.ref), AnswerFeedback())
            take_feedback(on_answer, LoggedFeedback(record, place, time_ms))
        elif record.attempt == number:
            first = Attempt(number, record.group_size, judged.lane, judged.sequence, time_ms)
            came = record.reason if isinstance(record, DropMarker) else BlockPlace(place, 0)
            group.attempts.setdefault(number, first).add(record, came)
    group.winner = number if group.attempts[number].is_complete else -1
    return group
