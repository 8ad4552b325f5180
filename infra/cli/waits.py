"""What an answer waits for on its way to a policy, in words."""

import time
from collections.abc import Mapping

from infra.ledger.trace import AnswerTrace

DROPPED = "dropped"


def waits(answer: AnswerTrace, windows: Mapping[str, float]) -> str:
    """What comes next for an answer that no published version has learned from; "" where nothing does.

    windows: seconds that collect waits for each source of feedback, as the settings have it now. An answer that came under
    other settings waits as these said.
    """
    if answer.dropped or answer.first_version is not None:
        return ""
    if any(not use.undone for use in answer.uses):
        return "trained; waits for the next version"
    if answer.buffered:
        return "waits in the buffer for a step that draws it"
    if any(closure.outcome == DROPPED for _, closure in answer.closures):
        return ""
    if answer.judged is None:
        return "waits for verify"
    lane = answer.judged.lane
    last = {(one.source, one.rater): one.type for _, one in answer.feedback}
    said = {source for (source, _), kind in last.items() if kind != "retraction"}
    if lane == "live" and (silent := [name for name in windows if name not in said]):
        until = answer.judged_ms / 1000 + max(windows.values())
        return (
            f"waits for feedback of {', '.join(silent)}, until {time.strftime('%m-%d %H:%M:%S', time.localtime(until))}"
        )
    if answer.judged.turn >= 0:
        return "waits for the rest of its session"
    return "waits for the others of its group"
