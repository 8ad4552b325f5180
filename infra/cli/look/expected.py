"""Expected and running roles: roles that are not there, or fewer of them than there should be. Pure.

Expected are the roles of the settings, as many as [expect] says, or else one of each. An app whose master has come to its end
expects nothing, and one that began less than STARTING_S ago still loads its models.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from infra.cli.settings import Expect

STARTING_S = 60.0  # of the app's first report: a role that neither reported nor failed may still load a model
OVER = ("stopped", "done", "failed")  # states of a role's last report


class Heard(msgspec.Struct, frozen=True):
    """A process, with the times of its first and last report by the log's clock, and why it stopped."""

    role: str
    instance: str
    state: str
    first_s: float
    last_s: float
    reason: str = ""


def expected_roles(expect: Expect, *, serves: bool) -> dict[str, int]:
    """Role to the number the settings ask for; a role that is not there is not expected."""
    wanted = {"master": 1, "train": 1, "explore": expect.explore or 1, "process": expect.process or 1}
    return wanted | ({"serve": expect.serve or 1} if serves else {})


def missing(wanted: Mapping[str, int], heard: Iterable[Heard], now_s: float, gone_s: float) -> list[str]:
    """One line for each role of which too few run. heard: every instance of the last hour. gone_s: seconds without
    a report after which a process does not run.
    """
    processes = list(heard)
    running = [process for process in processes if now_s - process.last_s < gone_s and process.state not in OVER]
    if not running and any(process.role == "master" and process.state == "done" for process in processes):
        return []
    began_s = min((process.first_s for process in running), default=0.0)
    found = []
    for role, number in wanted.items():
        of_role = [process for process in processes if process.role == role]
        here = [process for process in of_role if process in running]
        gone = [process for process in of_role if process not in here]
        is_loading = now_s - began_s < STARTING_S and all(process.last_s < began_s for process in gone)
        if len(here) < number and not is_loading:
            count = f"no {role} runs" if not here else f"{len(here)} of {number} {role} run"
            found.append(f"{count}: {_last_words(gone, now_s)}")
    return found


def _last_words(gone: Sequence[Heard], now_s: float) -> str:
    if not gone:
        return "no report was received; see its log"
    last = max(gone, key=lambda process: process.last_s)
    age_s = max(0.0, now_s - last.last_s)
    if last.state == "failed":
        return f"{last.instance} ended {age_s:.0f} s ago: {last.reason}"
    if last.state in OVER:
        return f"{last.instance} {last.state} {age_s:.0f} s ago"
    return f"{last.instance} last reported {age_s:.0f} s ago"
