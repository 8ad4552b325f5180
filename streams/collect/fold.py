"""collect: a fold over one partition of `verified`, one inbox in one order.

    (state, record) -> decisions          the only clock is the log-append time of the record

A group waits until every episode is there (its last part, or its stub) or its deadline has passed; then, in lanes that
wait for feedback, until every source has spoken or its window has passed; then the chain judges it and it is closed.
Guarantees: one closure per (group, attempt, revision), whatever is delivered twice; deadlines fire on consumption,
before the record whose time reached them and behind all earlier ones, so backlog, restart and replay decide alike;
the first attempt that completes wins; feedback is credited to the answer it names, or counted.
"""

import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from infra.chain.chain import Context, Dropped, Outcome, Step, run_chain
from schemas import Block, Closure, Control, DeadLetter, Experience, Feedback, Lane, Stub, Tick, encode
from schemas.ids import group_of
from streams.collect.credit import Source, answer_of, credited, is_labelled, is_repeat
from streams.collect.group import Attempt, Group, Place, Said, fullest
from streams.collect.state import State

MAX_BLOCK_EXPERIENCES = 64
Chain = Callable[[Sequence[Experience], Context], Awaitable[Outcome]]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What collect waits for. deadline_ms: after a group's first record. keep_ms: for how long a closed group is known.

    sources: feedback by name. waiting: the lanes whose answers wait for it.

    Example: Rules(deadline_ms=600_000, keep_ms=2_592_000_000, sources={"csat": Source(window_ms=86_400_000)})
    """

    deadline_ms: int
    keep_ms: int
    sources: dict[str, Source] = {}
    waiting: frozenset[Lane] = frozenset({"live"})

    @property
    def window_ms(self) -> int:
        """How long an answer waits for its slowest source."""
        return max((source.window_ms for source in self.sources.values()), default=0)


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """One record of the inbox; value is None for one that could not be read, frame a block's own bytes if at hand.

    Example: Arrival(partition=3, offset=981, timestamp_ms=1763715600000, value=Tick(partition=3, due_ms=1763715599000))
    """

    partition: int
    offset: int
    timestamp_ms: int
    value: Block | Control | None
    frame: bytes = b""


class Decision(msgspec.Struct, frozen=True):
    """How one attempt ended, and what goes on to the buffer because of it. dropped: members that the chain dropped.

    Example: Decision(Closure(group="add-3745.2", outcome="superseded", attempt=1), ())
    """

    closure: Closure
    blocks: tuple[Block, ...] = ()
    dropped: tuple[Dropped, ...] = ()


class Folded(msgspec.Struct):
    """What one record led to. dropped: reason to count. letters: records that nothing can be done with."""

    decisions: list[Decision] = []
    letters: list[DeadLetter] = []
    dropped: dict[str, int] = {}

    def drop(self, reason: str, count: int = 1) -> None:
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count


def chain_of(steps: Sequence[Step]) -> Chain:
    """The steps of stage collect as the fold calls them."""
    return functools.partial(run_chain, steps)


def group_named(value: Block | Control | None) -> str | None:
    """Group a record is about, None for none."""
    if isinstance(value, Block | Stub):
        return value.group
    if isinstance(value, Feedback):
        try:
            return group_of(value.ref)
        except ValueError:
            return None
    return None


def wanted(state: State, arrival: Arrival, rules: Rules) -> set[int]:
    """Offsets of `verified` whose blocks `fold` needs: those of the group that late feedback reopens.

    It is closed by now, or the feedback's own time closes it first.
    """
    value = arrival.value
    if not isinstance(value, Feedback):
        return set()
    group = state.groups.get(group_named(value) or "")
    source = rules.sources.get(value.source)
    if group is None or source is None or source.late == "drop":
        return set()
    is_due = 0 < group.due_ms <= max(state.now_ms, arrival.timestamp_ms)
    return group.offsets() if group.is_closed or is_due else set()


async def fold(
    state: State, arrival: Arrival, rules: Rules, chain: Chain, fetched: Mapping[int, Block] | None = None
) -> Folded:
    """Fold one record into `state` (changed in place). fetched: the blocks `wanted` asked for, as far as kept."""
    work = _Fold(state, arrival, rules, chain, fetched or {})
    state.now_ms = max(state.now_ms, arrival.timestamp_ms)
    state.expire(rules.keep_ms)
    while (group := state.pop_due()) is not None:
        await work.fire(group)
    match arrival.value:
        case Block():
            await work.block(arrival.value)
        case Stub():
            await work.stub(arrival.value)
        case Feedback():
            await work.feedback(arrival.value)
        case Tick() | None:
            pass
        case _:
            work.letter("unexpected record", type(arrival.value).__name__, encode(arrival.value))
    state.next_offset = arrival.offset + 1
    state.last_ms = arrival.timestamp_ms
    return work.folded


class _Fold:
    """One record on its way into the state."""

    def __init__(
        self, state: State, arrival: Arrival, rules: Rules, chain: Chain, fetched: Mapping[int, Block]
    ) -> None:
        self.state = state
        self.arrival = arrival
        self.rules = rules
        self.chain = chain
        self.fetched = fetched
        self.folded = Folded()

    async def block(self, block: Block) -> None:
        group = self._group(block.group)
        arrived: set[int] = set()
        for index, experience in enumerate(block.experiences):
            if self._arrive(group, experience, Place(self.arrival.offset, index)):
                arrived.add(experience.attempt)
        if arrived:
            self.state.frames.put(self.arrival.offset, block, self.arrival.frame)
            await self._settle_first(group, arrived)

    async def stub(self, stub: Stub) -> None:
        group = self._group(stub.group)
        if self._arrive(group, stub, stub.reason):
            await self._settle_first(group, (stub.attempt,))

    async def feedback(self, feedback: Feedback) -> None:
        group_id = group_named(feedback)
        if group_id is None:
            self.letter("bad ref", f"ref: got {feedback.ref!r}, expected the id of an answer", encode(feedback))
            self.folded.drop("feedback with a bad ref")
            return
        group = self._group(group_id)
        answer = answer_of(feedback.ref)
        said = Said(feedback, self.arrival.offset, self.arrival.timestamp_ms)
        if is_repeat(group.said.get(answer, ()), said):
            return
        if group.is_closed:
            await self._late(group, answer, said)
            return
        group.said.setdefault(answer, []).append(said)
        if group.winner >= 0:
            await self._close_unless_waiting(group)
        else:
            self.state.schedule(group, self._due_ms(group))

    async def fire(self, group: Group) -> None:
        """Time has come for an open group: its deadline, its feedback window, or that of feedback without an answer."""
        self.state.touched.add(group.id)
        if group.winner >= 0:
            await self._close(group)
        elif group.attempts:
            await self._settle(group, fullest(group.attempts))
        else:
            for said in (said for heard in group.said.values() for said in heard):
                self.folded.drop("feedback without an answer")
                self.letter("no answer", f"ref: {said.feedback.ref!r} never came", encode(said.feedback), said.offset)
            del self.state.groups[group.id]

    def letter(self, reason: str, error: str, value: bytes, offset: int | None = None) -> None:
        at = self.arrival.offset if offset is None else offset
        self.folded.letters.append(
            DeadLetter(
                topic="verified",
                partition=self.arrival.partition,
                offset=at,
                stage="collect",
                reason=reason,
                error=error,
                value=value[: 64 * 1024],
            )
        )

    def _group(self, group_id: str) -> Group:
        group = self.state.groups.get(group_id)
        if group is None:
            group = self.state.groups[group_id] = Group(group_id)
        self.state.touched.add(group_id)
        return group

    def _arrive(self, group: Group, record: Experience | Stub, arrived: Place | str) -> bool:
        """Note an experience or stub; True if its attempt is open and did not have it."""
        number = record.attempt
        if number in group.superseded:
            return False
        if group.winner >= 0:
            if number != group.winner:
                self._supersede(group, number, record.lane, record.sequence)
            elif group.attempts[number].add(record, "late") and isinstance(record, Experience):
                self.folded.drop("late")
            return False
        attempt = group.attempts.get(number)
        if attempt is None:
            first_ms = self.arrival.timestamp_ms
            attempt = Attempt(number, record.group_size, record.lane, record.sequence, first_ms)
            group.attempts[number] = attempt
            self.state.schedule(group, self._due_ms(group))
        if attempt.add(record, arrived):
            return True
        if record.episode >= attempt.group_size:
            self.folded.drop("episode beyond its group")
        return False

    async def _settle_first(self, group: Group, numbers: Iterable[int]) -> None:
        complete = [number for number in sorted(numbers) if group.attempts[number].is_complete]
        if complete:
            await self._settle(group, group.attempts[complete[0]])

    async def _settle(self, group: Group, attempt: Attempt) -> None:
        """`attempt` wins; all others are over."""
        group.winner = attempt.number
        for other in [other for other in group.attempts.values() if other is not attempt]:
            del group.attempts[other.number]
            self._supersede(group, other.number, other.lane, other.sequence)
            for offset in {place.offset for place in other.places()} - group.offsets():
                self.state.frames.remove(offset)
        await self._close_unless_waiting(group)

    def _supersede(self, group: Group, number: int, lane: Lane, sequence: int) -> None:
        group.superseded.append(number)
        closure = Closure(group=group.id, outcome="superseded", attempt=number, lane=lane, sequence=sequence)
        self.folded.decisions.append(Decision(closure))

    async def _close_unless_waiting(self, group: Group) -> None:
        attempt = group.attempts[group.winner]
        if attempt.lane in self.rules.waiting and self.rules.sources and attempt.places():
            due_ms = self._due_ms(group)
            members = self._members(attempt, self.state.frames.get)
            unheard = not all(is_labelled(group.said.get(member.id, ()), self.rules.sources) for member in members)
            if unheard and due_ms > self.state.now_ms:
                self.state.schedule(group, due_ms)
                return
        await self._close(group)

    async def _close(self, group: Group) -> None:
        attempt = group.attempts[group.winner]
        members = self._members(attempt, self.state.frames.get)
        drops = attempt.drops()
        if not attempt.is_complete:
            drops["missing at deadline"] = attempt.group_size - attempt.num_done
        known = {member.id for member in members}
        strays = sum(len(heard) for answer, heard in group.said.items() if answer not in known)
        self.folded.drop("feedback for an unknown answer", strays)
        await self._judge(group, attempt, members, drops, "" if attempt.is_complete else "deadline")
        for offset in group.offsets():
            self.state.frames.remove(offset)
        self.state.close(group)

    async def _late(self, group: Group, answer: str, said: Said) -> None:
        """Feedback about a closed group, as its source's policy says."""
        source = self.rules.sources.get(said.feedback.source)
        if source is None or source.late == "drop":
            self.folded.drop("late feedback")
            return
        attempt = group.attempts[group.winner]
        try:
            members = self._members(attempt, self.fetched.__getitem__)
        except KeyError:
            self.folded.drop("answer no longer in the log")
            return
        if answer not in {member.id for member in members}:
            self.folded.drop("feedback for an unknown answer")
            return
        group.said.setdefault(answer, []).append(said)
        group.revision += 1
        if source.late == "retrain":
            members = [msgspec.structs.replace(member, lane="human") for member in members]
        members = [msgspec.structs.replace(member, revision=group.revision) for member in members]
        await self._judge(group, attempt, members, attempt.drops(), f"late {source.late}")

    async def _judge(
        self, group: Group, attempt: Attempt, members: Sequence[Experience], drops: dict[str, int], reason: str
    ) -> None:
        """Credit, chain, closure."""
        waits = attempt.lane in self.rules.waiting
        sources = self.rules.sources
        given = tuple(credited(member, group.said.get(member.id, ()), sources, waits) for member in members)
        outcome = Outcome(kept=given, dropped=())
        # Demonstrations are what they are: nothing is compared, nothing is rewarded.
        if given and not all(member.is_given for member in given):
            context = Context(
                time_ms=self.arrival.timestamp_ms, record_offset=self.arrival.offset, memories=self.state.memories
            )
            outcome = await self.chain(given, context)
        for gone in outcome.dropped:
            drops[gone.reason] = drops.get(gone.reason, 0) + 1
        for label, count in drops.items():
            self.folded.drop(label, count)
        own = [experience for experience in outcome.kept if experience.group == group.id]
        closure = Closure(
            group=group.id,
            outcome="buffered" if own else "dropped",
            reason=reason if own or not drops else max(drops, key=lambda label: drops[label]),
            attempt=attempt.number,
            revision=group.revision,
            sequence=attempt.sequence,
            lane=own[0].lane if own else attempt.lane,
            experiences=len(own),
            mean_reward=_mean_reward((*own, *(gone.experience for gone in outcome.dropped))),
            drops=drops,
        )
        self.folded.decisions.append(Decision(closure, blocks_of(outcome.kept), outcome.dropped))

    def _members(self, attempt: Attempt, block_at: Callable[[int], Block]) -> list[Experience]:
        return [block_at(place.offset).experiences[place.index] for place in attempt.places(done_only=True)]

    def _due_ms(self, group: Group) -> int:
        """When time alone decides about an open group."""
        if group.winner >= 0:
            return group.attempts[group.winner].first_ms + self.rules.window_ms
        if group.attempts:
            return min(attempt.first_ms for attempt in group.attempts.values()) + self.rules.deadline_ms
        first_ms = min(said.time_ms for heard in group.said.values() for said in heard)
        return first_ms + max(self.rules.window_ms, self.rules.deadline_ms)


def blocks_of(experiences: Sequence[Experience]) -> tuple[Block, ...]:
    """Blocks of one group each, in order of first appearance."""
    groups: dict[str, list[Experience]] = {}
    for experience in experiences:
        groups.setdefault(experience.group, []).append(experience)
    return tuple(
        Block(experiences=tuple(members[start : start + MAX_BLOCK_EXPERIENCES]))
        for members in groups.values()
        for start in range(0, len(members), MAX_BLOCK_EXPERIENCES)
    )


def _mean_reward(experiences: Sequence[Experience]) -> float | None:
    """Mean over the episodes that have a reward, told by their last parts."""
    rewards = [experience.reward for experience in experiences if experience.last and experience.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
