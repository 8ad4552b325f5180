"""Expected and running roles: roles that are not there, or fewer of them than there should be. Pure.

Expected are the roles of the settings: as many as [expect] says, or else as many as run, and those that failed within the last
hour and were not replaced by a process that began later. A process that is started again on any machine replaces itself, so
none is missing. A process that was stopped in order is missing only where it was the last of its role.
An app whose master has come to its end expects nothing, and one that began less than STARTING_S ago still loads its models.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from infra.cli.settings import Expect

SEEN_S = 3600.0  # a process that reported within the last hour and did not end in order should still run
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

    @property
    def place(self) -> str:
        return self.instance.split("/")[1] if "/" in self.instance else ""


def expected_roles(expect: Expect, *, serves: bool) -> dict[str, int]:
    """Role to the number the settings ask for, 0 for "as many as there were"; a role that is not there is not expected."""
    wanted = {"master": 1, "train": 1, "explore": expect.explore, "process": expect.process}
    return wanted | ({"serve": expect.serve} if serves else {})


def process_name(instance: str) -> str:
    """Role, machine and process; of a gateway without the part that differs from start to start.

    >>> process_name("serve/vm/417/9f00a1b2")
    'serve/vm/417'
    """
    return "/".join(instance.split("/")[:3])


def missing(wanted: Mapping[str, int], heard: Iterable[Heard], now_s: float, gone_s: float) -> list[str]:
    """One line for each role of which too few run. heard: every instance of the last hour. gone_s: seconds without
    a report after which a process does not run.
    """
    processes = _processes(heard)
    running = [process for process in processes if now_s - process.last_s < gone_s and process.state not in OVER]
    if not running and any(process.role == "master" and process.state == "done" for process in processes):
        return []
    starting = bool(running) and now_s - min(process.first_s for process in running) < STARTING_S
    found = []
    for role, number in wanted.items():
        of_role = [process for process in processes if process.role == role]
        here = [process for process in of_role if process in running]
        lost = vacant(of_role, here, now_s)
        if starting and not here and not lost:
            continue
        expected = number or max(1, len(here) + len(lost))
        if len(here) < expected:
            count = f"no {role} runs" if not here else f"{len(here)} of {expected} {role} run"
            gone = lost or [process for process in of_role if process not in here]
            found.append(f"{count}: {_last_words(gone, now_s)}")
    return found


def vacant(of_role: Sequence[Heard], here: Sequence[Heard], now_s: float) -> list[Heard]:
    """The processes of a role that failed within the last hour and were not replaced.

    A process whose first report comes after the end of another replaces it, one of the same machine before any other.
    """
    lost = [
        process
        for process in of_role
        if process not in here and now_s - process.last_s < SEEN_S and process.state not in ("stopped", "done")
    ]
    for new in sorted(of_role, key=lambda process: process.first_s):
        before = [process for process in lost if process.last_s < new.first_s]
        if before:
            lost.remove(max(before, key=lambda process: (process.place == new.place, process.last_s)))
    return lost


def _processes(heard: Iterable[Heard]) -> list[Heard]:
    found: dict[str, Heard] = {}
    for process in sorted(heard, key=lambda process: process.last_s):
        name = process_name(process.instance)
        before = found.get(name)
        first_s = process.first_s if before is None else min(before.first_s, process.first_s)
        found[name] = msgspec.structs.replace(process, first_s=first_s)
    return list(found.values())


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
