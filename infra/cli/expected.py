"""What should be running, beside what is: roles that are not there, or fewer of them than there should be. Pure.

Expected are the roles the settings ask for, one of each, or as many as [expect] says, or as many as have lately spoken.
An app whose master has come to its end expects nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from infra.settings.config import NonNegative, Section

SEEN_S = 3600.0  # what spoke within the last hour and did not end in order should still be there
OVER = ("stopped", "done", "failed")  # what a role says last of all


class Expect(Section, frozen=True):
    """[expect]: how many of each role `headrace status` expects to run; 0 is as many as spoke within the last hour, one at
    least.

    explore: explorers. process: stream workers. serve: gateways, expected only where the file has a [gateway].

    Example: Expect(explore=8, process=4, serve=2)
    """

    explore: NonNegative = 0
    process: NonNegative = 0
    serve: NonNegative = 0


def wanted_of(expect: Expect, *, serves: bool) -> dict[str, int]:
    """Role to the number the settings ask for, 0 for "as many as there were"; a role that is not there is not expected."""
    wanted = {"master": 1, "train": 1, "explore": expect.explore, "process": expect.process}
    return wanted | ({"serve": expect.serve} if serves else {})


def missing(wanted: Mapping[str, int], newest: Sequence[Mapping[str, Any]], gone_s: float) -> list[str]:
    """One line for each role of which too few run. newest: the newest report of every instance, as `status` shows them."""
    alive = [one for one in newest if one["age_s"] < gone_s and one["state"] not in OVER]
    if not alive and any(one["role"] == "master" and one["state"] == "done" for one in newest):
        return []
    found = []
    for role, number in wanted.items():
        here = [one for one in alive if one["role"] == role]
        seen = {place_of(one["instance"]) for one in newest if one["role"] == role and _should_be_there(one)}
        expected = number or max(1, len(seen))
        if len(here) < expected:
            count = f"no {role} runs" if not here else f"{len(here)} of {expected} {role} run"
            found.append(f"{count}: {_last_of(role, newest, here)}")
    return found


def place_of(instance: str) -> str:
    """An instance without its process: what is started again in its place has the same.

    >>> place_of("explore-0/4711")
    'explore-0'
    """
    return "/".join(part for part in instance.split("/") if not part.isdigit())


def _should_be_there(one: Mapping[str, Any]) -> bool:
    return bool(one["age_s"] < SEEN_S and one["state"] not in ("stopped", "done"))


def _last_of(role: str, newest: Sequence[Mapping[str, Any]], here: Sequence[Mapping[str, Any]]) -> str:
    """What was last heard of one that is not there."""
    gone = [one for one in newest if one["role"] == role and one not in here]
    if not gone:
        return "none has ever spoken; see its log"
    last = min(gone, key=lambda one: one["age_s"])
    if last["state"] == "failed":
        return f"{last['instance']} ended {last['age_s']:.0f} s ago: {last['reason']}"
    if last["state"] in OVER:
        return f"{last['instance']} {last['state']} {last['age_s']:.0f} s ago"
    return f"{last['instance']} was last heard of {last['age_s']:.0f} s ago"
