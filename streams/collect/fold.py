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

from infra.chain.chain import Context, Outcome, Step, run_chain
from schemas import Block, Closure, Control, DeadLetter, Experience, Feedback, Lane, Stub, Tick, encode
from schemas.ids import group_of
from schemas.withdrawal import withdrawal_of
from streams.collect.credit import (
    OpenText,
    Source,
    answer_of,
    as_it_is,
    credited,
    is_labelled,
    is_repeat,
    ratings,
    with_edit,
)
from streams.collect.decision import Decision, Folded, blocks_of, mean_reward, trial_of
from streams.collect.group import Attempt, Group, Place, Said, fullest, take_in
from streams.collect.held import held_back
from streams.collect.state import State
from streams.collect.turns import depth_of, echoing, hearers, new_echoes

Chain = Callable[[Sequence[Experience], Context], Awaitable[Outcome]]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What collect waits for. deadline_ms: after a group's first record. keep_ms: for how long a closed group is known.

    sources: feedback by name. waiting: the lanes whose answers wait for it. corrects: the chain learns from edits.
    open_text: see `edit_of`.

    Example: Rules(deadline_ms=600_000, keep_ms=2_592_000_000, sources={"csat": Source(window_ms=86_400_000)})
    """

    deadline_ms: int
    keep_ms: int
    sources: dict[str, Source] = {}
    waiting: frozenset[Lane] = frozenset({"live"})
    corrects: bool = False
    open_text: OpenText = as_it_is

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
    """Offsets of `verified` whose blocks `fold` needs: those of the groups that late feedback reopens.

    They are closed by now, or the record's own time closes them first.
    """
    value = arrival.value
    name = group_named(value)
    if name is None or not isinstance(value, Feedback | Block):
        return set()
    group, names = state.groups.get(name), echoing(rules.sources)
    reopened = hearers(group, value, state.turns(name), names) if names else []
    if isinstance(value, Feedback):
        source = rules.sources.get(value.source)
        if source is None or source.late == "drop":
            return set()
        reopened = [group, *reopened] if group is not None else reopened
    now_ms = max(state.now_ms, arrival.timestamp_ms)
    return {offset for one in reopened if one.is_closed or 0 < one.due_ms <= now_ms for offset in one.offsets()}


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
            group.depth = depth_of(block.experiences[0])
            self.state.frames.put(self.arrival.offset, block, self.arrival.frame)
            await self._echo(group)  # first: what is settled may be closed, with all it has heard
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
        answer = answer_of(feedback.ref)
        said = Said(feedback, self.arrival.offset, self.arrival.timestamp_ms)
        known = self.state.groups.get(group_id)
        if known is not None and is_repeat(known.said.get(answer, ()), said):
            return
        source = self.rules.sources.get(feedback.source)
        heard = feedback
        if source is not None and source.alike and feedback.text:
            heard = msgspec.structs.replace(feedback, text=self.rules.open_text(feedback.text, answer))
        if reason := held_back(self.state.memories, heard, source, self.arrival.timestamp_ms):
            self.folded.drop(reason)
            return
        if feedback.type == "correction" and not self.rules.corrects:
            self.folded.drop("correction without [collect.correct]")
        group = self._group(group_id)
        await self._hear(group, said)
        await self._echo(group)

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
            self.state.remove(group.id)

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
            group = Group(group_id)
            self.state.add(group)
        self.state.touched.add(group_id)
        return group

    async def _hear(self, group: Group, said: Said, turns: int = 0) -> None:
        """Take in what was said about an answer of this group, or of a group so many turns later."""
        if group.is_closed:
            await self._late(group, said, turns)
            return
        take_in(group, said, turns)
        if group.winner >= 0:
            await self._close_unless_waiting(group)
        elif not turns:
            self.state.schedule(group, self._due_ms(group))

    async def _echo(self, group: Group) -> None:
        """Let turns of the session hear what they have not heard of later ones."""
        names = echoing(self.rules.sources)
        if group.depth < 0 or not names:
            return
        for turn, echo in new_echoes(group, self.state.turns(group.id), names, self.arrival.offset):
            self.state.touched.add(turn.id)
            await self._hear(turn, echo.said, echo.turns)

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
            sources, echoes = self.rules.sources, group.echoes
            unheard = not all(is_labelled(group.said.get(member.id, ()), sources, echoes) for member in members)
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

    async def _late(self, group: Group, said: Said, turns: int) -> None:
        """Feedback for a closed group, as its source's policy says."""
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
        if not turns and answer_of(said.feedback.ref) not in {member.id for member in members}:
            self.folded.drop("feedback for an unknown answer")
            return
        take_in(group, said, turns)
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
        for lost in (member.lost for member in members if member.lost):
            drops[lost] = drops.get(lost, 0) + 1
        given = tuple(self._credited(group, member, waits) for member in members if not member.lost)
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
        sent = outcome.kept if own else (*outcome.kept, *self._taken_back(group, members))
        group.lane = own[0].lane if own else None
        closure = Closure(
            group=group.id,
            outcome="buffered" if own else "dropped",
            reason=reason if own or not drops else max(drops, key=lambda label: drops[label]),
            attempt=attempt.number,
            revision=group.revision,
            sequence=attempt.sequence,
            lane=own[0].lane if own else attempt.lane,
            experiences=len(own),
            mean_reward=mean_reward((*own, *(gone.experience for gone in outcome.dropped))),
            drops=drops,
            version=min((member.min_version for member in given), default=-1),
            trial=trial_of(given),
            ratings=ratings(said for member in members for said in group.said.get(member.id, ())),
            answered_ms=attempt.first_ms if attempt.lane == "live" else -1,
        )
        self.folded.decisions.append(Decision(closure, blocks_of(sent), outcome.dropped))

    def _credited(self, group: Group, member: Experience, waits: bool) -> Experience:
        said = group.said.get(member.id, ())
        scored = credited(member, said, self.rules.sources, waits, group.echoes)
        return with_edit(scored, said, self.rules.open_text) if self.rules.corrects else scored

    def _taken_back(self, group: Group, members: Sequence[Experience]) -> tuple[Experience, ...]:
        """What an older revision sent on, where this one has nothing in its place."""
        if group.lane is None:
            return ()
        return (withdrawal_of(members[0], lane=group.lane, revision=group.revision),)

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
