"""The divergence guard: what to do after each step, decided from what the step reported.

Pure: a state goes in, a state and a verdict come out.
"""

from typing import Literal

import msgspec

Verdict = Literal["go", "skip", "rollback"]


class GuardState(msgspec.Struct, frozen=True):
    """skips: consecutive steps that changed nothing."""

    skips: int = 0


def judge(
    state: GuardState, *, finite: bool, alarms: tuple[str, ...], halting: frozenset[str], max_skips: int
) -> tuple[GuardState, Verdict, str]:
    """The verdict on one step, and why.

    alarms: raised by the step's diagnostics. halting: alarms the configuration set to stop publication. max_skips:
    consecutive steps without effect after which the last good policy is restored.
    """
    fatal = sorted(halting.intersection(alarms))
    if fatal:
        return GuardState(), "rollback", f"alarm {', '.join(fatal)}"
    if finite:
        return GuardState(), "go", ""
    if state.skips + 1 >= max_skips:
        return GuardState(), "rollback", f"{state.skips + 1} steps in a row were not finite"
    return GuardState(skips=state.skips + 1), "skip", "loss or gradient not finite"
