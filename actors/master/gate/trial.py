"""A trial: whether a version that a share of sessions tries serves them worse than the stable one serves the others. Pure.

Both sides are of the same time and drawn by lot, so nothing but the version differs. People are compared with others of
the same tenant whose answers were given within the same block of time: given how many of them complain, who does is drawn
from an urn where the versions are as good (`evidence.log_odds_ratio`), however often people complain at that time. So a
daily cycle, a trend or a change of the share moves nothing. The likelihood ratio of `odds` times the odds of a complaint
is a martingale under either, so at whatever moment one looks, a version that is no worse is turned away with probability
alpha / 3 at most, and one that is `odds` times worse is let through by what people say with probability beta at most.
Failures and refusals are tested as the guard does, with the other two thirds of alpha.

Assumptions, each with an alarm where it fails (`actors.master.gate.people`): a session is drawn by lot and its people are
independent of each other (one word of each: `actors.master.gate.ratings`); words that come later than `mature` are few.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from actors.config import CanaryConfig, PeopleConfig
from actors.master.gate.evidence import against, log_odds_ratio
from actors.master.gate.guard import NUM_TRIAL_TESTS, failures, harmed
from actors.master.gate.ratings import Tally, Voices
from infra.settings.config import duration_s

Ending = Literal["", "passed", "failed"]
LEAST_OF_BLOCK = 8  # people of both sides; fewer wait for those of the next block


class TrialResult(msgspec.Struct, frozen=True):
    """The state of a trial. ended: "" while it lasts. numbers: what it was decided on. reason: for people.

    Example: TrialResult(ended="passed", reason="rated down by 30 of 412 people, version 40 by 305 of 3720", numbers={...})
    """

    ended: Ending
    reason: str = ""
    numbers: dict[str, float] = {}


class PeopleBlock(msgspec.Struct, frozen=True):
    """People of one tenant and one time on both sides.

    tenant: of the keys. at_ms: when the time begins. new, old: how many people met the version on trial, and the stable
    one. new_bad, old_bad: how many of them complained.

    Example: PeopleBlock(tenant="mddrffqv", at_ms=1763715600000, new=2, new_bad=1, old=17, old_bad=2)
    """

    tenant: str
    at_ms: int
    new: int = 0
    new_bad: int = 0
    old: int = 0
    old_bad: int = 0

    def __add__(self, more: "PeopleBlock") -> "PeopleBlock":
        return PeopleBlock(
            self.tenant, more.at_ms,
            self.new + more.new, self.new_bad + more.new_bad, self.old + more.old, self.old_bad + more.old_bad,
        )  # fmt: skip


class TrialEvidence(msgspec.Struct, frozen=True):
    """What people say of both sides.

    people, bad: raters of the version on trial, and how many complained. people_stable, bad_stable: the same of the
    stable one. against, favour: log ratios; see `decided`.
    """

    people: int = 0
    bad: int = 0
    people_stable: int = 0
    bad_stable: int = 0
    against: float = 0.0
    favour: float = 0.0


def outcome(
    config: CanaryConfig,
    people: PeopleConfig,
    evidence: TrialEvidence,
    new: Mapping[str, Tally],
    old: Mapping[str, Tally],
    age_ms: int,
) -> TrialResult:
    """The state of a trial of that age. new, old: what both sides served, by client."""
    numbers = {f"trial/{name}": float(value) for name, value in msgspec.structs.asdict(evidence).items()}
    stable = f"the stable version by {evidence.bad_stable} of {evidence.people_stable}"
    reason = f"rated down by {evidence.bad} of {evidence.people} people, {stable}"
    ended = decided(config, evidence.against, evidence.favour)
    if ended == "failed":
        return TrialResult("failed", reason, numbers)
    bound = math.log(NUM_TRIAL_TESTS / config.alpha)
    fault = harmed(failures(config.more_failed), bound, config.least, people.tenant_share, new, old)
    if fault is not None:
        return TrialResult("failed", f"{fault.reason}, the stable version {fault.before}", numbers | fault.numbers)
    if ended == "passed":
        return TrialResult("passed", reason, numbers)
    if age_ms >= duration_s(config.longest) * 1000:
        return TrialResult("failed", f"undecided after {config.longest}: {reason}", numbers)
    return TrialResult("")


def evidence_of(
    config: CanaryConfig, people: PeopleConfig, blocks: Sequence[PeopleBlock], *, several: bool
) -> TrialEvidence:
    """What blocks of people say, up to the first that decides: whenever one looks, the same. several: see `weighed`."""
    found = TrialEvidence(
        people=sum(one.new for one in blocks),
        bad=sum(one.new_bad for one in blocks),
        people_stable=sum(one.old for one in blocks),
        bad_stable=sum(one.old_bad for one in blocks),
    )
    for against_, favour in weighed(config, people, merged(blocks), several=several):
        found = msgspec.structs.replace(found, against=against_, favour=favour)
        if decided(config, against_, favour):
            break
    return found


def blocks_of(voices: Voices, trial: int, stable: int, block_ms: int, before_ms: int) -> list[PeopleBlock]:
    """People of a trial by tenant and block of time, of answers given before a time."""
    counts: dict[tuple[str, int], Counter[str]] = {}
    for voice in voices:
        if voice.answered_ms >= before_ms or voice.arm not in ((trial, trial), (stable, trial)):
            continue
        side = "new" if voice.arm[0] == trial else "old"
        found = counts.setdefault((voice.tenant, voice.answered_ms // block_ms * block_ms), Counter())
        found[side] += 1
        found[f"{side}_bad"] += bool(voice.bad)
    return [
        PeopleBlock(tenant, at_ms, **counts[tenant, at_ms])
        for tenant, at_ms in sorted(counts, key=lambda one: one[::-1])
    ]


def merged(blocks: Iterable[PeopleBlock]) -> list[PeopleBlock]:
    """Blocks in the order of time; those of a tenant with too few people to compare are one with the next of that tenant.

    Whether a block waits depends on how many people spoke, not on what they said. The last ones still wait.
    """
    found, waiting = [], dict[str, PeopleBlock]()
    for block in blocks:
        both = waiting.pop(block.tenant) + block if block.tenant in waiting else block
        if both.new and both.old and both.new + both.old >= LEAST_OF_BLOCK:
            found.append(both)
        else:
            waiting[block.tenant] = both
    return found


def weighed(
    config: CanaryConfig, people: PeopleConfig, blocks: Iterable[PeopleBlock], *, several: bool
) -> Iterator[tuple[float, float]]:
    """The evidence against the version and in its favour after each block: see `decided`.

    several: there is more than one tenant.
    """
    logs: dict[str, float] = {}
    share = people.tenant_share if several else 1.0
    turned, let = turns_away(config), lets_through(config)
    for block in blocks:
        more = log_odds_ratio(block.new, block.new_bad, block.old, block.old_bad, config.odds)
        logs[block.tenant] = logs.get(block.tenant, 0.0) + more
        yield against(logs.values(), turned, share), -against([-one for one in logs.values()], let, share)


def turns_away(config: CanaryConfig) -> float:
    """The evidence that turns a version away."""
    return math.log(NUM_TRIAL_TESTS / config.alpha)


def lets_through(config: CanaryConfig) -> float:
    """How far below 0 the evidence lets a version through."""
    return -math.log(config.beta)


def decided(config: CanaryConfig, evidence_against: float, favour: float) -> Ending:
    """What the evidence says: log likelihood ratios of `odds` times the odds, of all tenants together.

    Where there are several, none gives more than its share of what turns a version away (against), or of what lets it
    through (favour).
    """
    if evidence_against >= turns_away(config):
        return "failed"
    return "passed" if favour <= -lets_through(config) else ""
