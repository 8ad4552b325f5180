"""Stage collect: a fold over a partition of `verified`.

    (state, record) -> decisions          the only clock is the log-append time of the record

A group waits until all its episodes have arrived (the last part, or a drop marker) or its deadline has passed. In lanes with
feedback it then waits for every source, or the end of its window. A turn of a session then waits for the other turns
(`streams.collect.turns`). Then the chain runs and the group is closed.

Guarantees: one closure per (group, attempt, revision), also with duplicate records. A deadline fires when the first record
after it is read, before that record and after all earlier records, so a backlog, a restart and a replay decide alike. The first
attempt that completes wins. Feedback is credited to the answer that it names, or counted.
"""

import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from infra.chain.chain import Context
from schemas import Block, Closure, DropMarker, Experience, Feedback, Lane, Tick, encode
from schemas.ids import group_of, tenant_in
from streams.collect.decision import Chain, Decision, Folded, counted_feedback, dead_letter, judged, learned
from streams.collect.feedback import (
    OpenText,
    is_labelled,
    is_repeat,
    learn_usual,
    mean_values,
    named_answer,
    ratings,
    take_feedback,
    usual_value,
)
from streams.collect.limits import beyond, charge
from streams.collect.rules import Arrival, Rules, due_ms, group_named, late_is_dropped
from streams.collect.state import (
    AnswerFeedback,
    Attempt,
    BlockPlace,
    Group,
    LaterCredit,
    LoggedFeedback,
    State,
    fullest,
    members_at,
)
from streams.collect.turns import (
    NO_TURN,
    came_ms,
    closable,
    crediting,
    cut_runs,
    ended_by,
    joined,
    joined_again,
    late_credit,
    new_credits,
    turn_depth,
)
from streams.stages.verify import STAGE as VERIFY

MAX_ANSWERS = 1024  # of a group, with feedback before it is closed


# Blocks of `verified` at these offsets, as far as retention keeps them.
BlocksAt = Callable[[Sequence[int]], Awaitable[dict[int, Block]]]


async def no_blocks(offsets: Sequence[int]) -> dict[int, Block]:
    return {}


async def fold(state: State, arrival: Arrival, rules: Rules, chain: Chain, blocks_at: BlocksAt = no_blocks) -> Folded:
    """Fold one record into `state` (changed in place)."""
    work = _Fold(state, arrival, rules, chain, blocks_at)
    state.now_ms = max(state.now_ms, arrival.timestamp_ms)
    state.expire(rules.keep_ms)
    while (group := state.pop_due()) is not None:
        await work.fire(group)
    match arrival.value:
        case Block():
            await work.block(arrival.value)
        case DropMarker():
            await work.marker(arrival.value)
        case Feedback():
            await work.feedback(arrival.value)
        case Tick() | None:
            pass
        case _:
            work.letter("unexpected record", type(arrival.value).__name__, encode(arrival.value))
    await work.make_room()
    state.next_offset = arrival.offset + 1
    state.last_ms = arrival.timestamp_ms
    return work.folded


class _Fold:
    def __init__(self, state: State, arrival: Arrival, rules: Rules, chain: Chain, blocks_at: BlocksAt) -> None:
        self.state = state
        self.arrival = arrival
        self.rules = rules
        self.chain = chain
        self.blocks_at = blocks_at
        self.fetched: dict[int, Block] = {}
        self.folded = Folded()

    async def block(self, block: Block) -> None:
        group = self._group(block.group)
        arrived: set[int] = set()
        for index, experience in enumerate(block.experiences):
            if self._arrive(group, experience, BlockPlace(self.arrival.offset, index)):
                arrived.add(experience.attempt)
        if arrived:
            group.depth = turn_depth(block.experiences[0])
            self.state.frames.put(self.arrival.offset, block, self.arrival.frame)
            ended = ended_by(group, block.experiences[0], self.state.turns(group.id)) if self.rules.session_ms else []
            for turn in ended:
                turn.is_over = True
                self.state.touched.add(turn.id)
            await self._credit_earlier(group, came=True)  # first: a settled group may be closed, with all its credit
            await self._settle_first(group, arrived)
            if ended:
                await self._close_over(group)

    async def marker(self, marker: DropMarker) -> None:
        group = self._group(marker.group)
        if self._arrive(group, marker, marker.reason):
            if marker.stage != VERIFY:  # verify counted its own
                self.folded.drop(marker.reason)
            await self._settle_first(group, (marker.attempt,))

    async def feedback(self, feedback: Feedback) -> None:
        group_id = group_named(feedback)
        if group_id is None:
            self.letter("bad ref", f"ref: got {feedback.ref!r}, expected the id of an answer", encode(feedback))
            self.folded.drop("feedback with a bad ref")
            return
        answer = named_answer(feedback.ref)
        logged = LoggedFeedback(feedback, self.arrival.offset, self.arrival.timestamp_ms)
        known = self.state.groups.get(group_id)
        if known is not None and is_repeat(known.feedback.get(answer), feedback):
            return
        memories, tenant, is_back = self.state.memories, tenant_in(group_id), feedback.type == "retraction"
        if not is_back and (reason := beyond(memories, self.rules.limits, tenant, feedback.rater, self.state.now_ms)):
            self.folded.drop(reason)
            return
        if feedback.type == "correction" and not self.rules.corrects:
            self.folded.drop("correction without [collect.correct]")
        group = self._group(group_id)
        moved: int = await self._take_feedback(group, logged)
        moved += await self._credit_earlier(group, is_back=is_back)
        if moved and not is_back:
            charge(memories, tenant, feedback.rater, self.state.now_ms, moved)

    async def fire(self, group: Group) -> None:
        """Time has come for an open group: its deadline, its feedback window, or that of feedback without an answer."""
        self.state.touched.add(group.id)
        if group.winner >= 0 and not group.is_ready and due_ms(group, self.rules) > self.state.now_ms:
            await self._close_unless_waiting(group)  # the rules are others than those it was saved under
        elif group.winner >= 0:
            await self._end(group)
        elif group.attempts:
            await self._settle(group, fullest(group.attempts))
        else:
            counted = [logged for on_answer in group.feedback.values() for logged in on_answer.counted]
            self.folded.drop("feedback without an answer", max(1, len(counted)))
            for logged in counted:
                self.letter(
                    "no answer", f"ref: {logged.feedback.ref!r} never came", encode(logged.feedback), logged.offset
                )
            self.state.remove(group.id)

    def letter(self, reason: str, error: str, value: bytes, offset: int | None = None) -> None:
        at = self.arrival.offset if offset is None else offset
        self.folded.letters.append(dead_letter(self.arrival.partition, at, reason, error, value))

    def _group(self, group_id: str) -> Group:
        group = self.state.groups.get(group_id)
        if group is None:
            group = Group(group_id)
            self.state.add(group)
        self.state.touched.add(group_id)
        return group

    async def _take_feedback(self, group: Group, logged: LoggedFeedback) -> bool:
        answer = named_answer(logged.feedback.ref)
        if group.is_closed:
            return await self._late(group, answer, logged)
        if answer not in group.feedback and len(group.feedback) >= MAX_ANSWERS:
            self.folded.drop("feedback about too many answers of a group")
            return False
        is_moved = self._add(group.feedback.setdefault(answer, AnswerFeedback()), logged)
        if group.winner >= 0:
            await self._close_unless_waiting(group)
        elif not group.due_ms:
            rules = self.rules
            self.state.schedule(group, self.arrival.timestamp_ms + max(rules.window_ms, rules.deadline_ms))
        return is_moved

    def _add(self, on_answer: AnswerFeedback, logged: LoggedFeedback) -> bool:
        before, counted = mean_values(on_answer), on_answer.counted
        self.folded.drop(take_feedback(on_answer, logged, self.rules.open_text))
        if crediting(self.rules.sources):
            tenant = tenant_in(group_of(logged.feedback.ref))
            learn_usual(self.state.memories, tenant, before, mean_values(on_answer))
        return on_answer.counted is not counted

    async def _credit_earlier(self, group: Group, *, came: bool = False, is_back: bool = False) -> int:
        names, credited = crediting(self.rules.sources), set()
        if group.depth < 0 or not names:
            return 0
        changed: list[tuple[Group, str, LaterCredit]] = []
        for turn, later, credit in new_credits(group, self.state.turns(group.id), names, came):
            if turn.is_closed:
                before = turn.credits.get(later)
                sources = self.rules.sources.items()
                dropped = [name for name, source in sources if late_is_dropped(turn, source, self.state.now_ms)]
                late = late_credit(before, credit, dropped)
                self.folded.drop("late feedback" if late.values != credit.values else "")
                if late == before:
                    continue
                credit = late
            changed.append((turn, later, credit))
        await self._fetch(
            turn for turn, *_ in changed if turn.is_closed and (is_back or turn.num_credited < self.rules.revisions)
        )
        revised: dict[str, tuple[Group, list[Experience]]] = {}
        for turn, later, credit in changed:
            if turn.is_closed:
                if (members := await self._reopened(turn, turn.num_credited, is_back)) is None:
                    continue
                revised[turn.id] = (turn, members)
            turn.credits[later] = credit
            self.state.touched.add(turn.id)
            credited.add(turn.id)
        for turn, members in revised.values():
            turn.num_credited += 1
            await self._revise(turn, members, "late credit")
        return len(credited)

    def _arrive(self, group: Group, record: Experience | DropMarker, arrived: BlockPlace | str) -> bool:
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
            self.state.schedule(group, due_ms(group, self.rules))
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
            until_ms = due_ms(group, self.rules)
            members = await self._brought(attempt)
            unlabelled = not all(is_labelled(group.feedback.get(member.id), self.rules.sources) for member in members)
            if unlabelled and until_ms > self.state.now_ms:
                self.state.unhold(group)
                self.state.wait(group)
                self.state.schedule(group, until_ms)
                return
        await self._end(group)

    async def _end(self, group: Group) -> None:
        if group.depth == NO_TURN:
            await self._close(group)
            return
        self.state.hold(group, came_ms(group))
        self.state.schedule(group, 0)
        await self._close_over(group)

    async def _close_over(self, group: Group) -> None:
        turns = self.state.turns(group.id)
        found = closable(turns, self.state.now_ms, self.rules.session_ms)
        for run in found.runs:
            await self._close_run(run)
        held = [turn for turn in turns if turn.is_ready and not turn.is_over]
        if found.again_ms and held and not any(turn.due_ms == found.again_ms for turn in held):
            self.state.schedule(held[-1], found.again_ms)
            self.state.touched.add(held[-1].id)

    async def _close_run(self, turns: Sequence[Group]) -> None:
        begin, name = len(self.folded.decisions), turns[0].id
        for turn in turns:
            turn.join = name if len(turns) > 1 else ""
            self.state.touched.add(turn.id)
            await self._close(turn)
        self.folded.decisions[begin:] = joined(self.folded.decisions[begin:], name)

    async def make_room(self) -> None:
        """Close the sessions that have waited longest, where too many turns wait."""
        limit = self.rules.session_turns
        if self.state.num_held() <= limit:
            return
        for turn in self.state.longest_held(self.state.num_held() - limit + limit // 10):
            if turn.is_ready:
                ready = [other for other in self.state.turns(turn.id) if other.is_ready and not other.is_closed]
                for run in cut_runs(ready):
                    await self._close_run(run)
                self.folded.closed_early += 1

    async def _close(self, group: Group) -> None:
        attempt = group.attempts[group.winner]
        members = await self._brought(attempt)
        known = {member.id for member in members}
        strays = sum(len(on_answer.counted) for answer, on_answer in group.feedback.items() if answer not in known)
        self.folded.drop("feedback for an unknown answer", strays)
        group.feedback = {answer: on_answer for answer, on_answer in group.feedback.items() if answer in known}
        await self._judge(group, members, "" if attempt.is_complete else "deadline")
        for offset in group.offsets():
            self.state.frames.remove(offset)
        self.state.close(group)

    async def _late(self, group: Group, answer: str, logged: LoggedFeedback) -> bool:
        source, open_text = self.rules.sources.get(logged.feedback.source), self._open_text
        if source is None or late_is_dropped(group, source, self.state.now_ms):
            self.folded.drop("late feedback")
            return False
        num_rated = group.revision - group.num_credited
        members = await self._reopened(group, num_rated, logged.feedback.type == "retraction")
        if members is None:
            return False
        if answer not in {member.id for member in members}:
            self.folded.drop("feedback for an unknown answer")
            return False
        on_answer = group.feedback.setdefault(answer, AnswerFeedback())
        before, rated = counted_feedback(group, answer, open_text), ratings((on_answer,))
        self._add(on_answer, logged)
        after = counted_feedback(group, answer, open_text)
        if after == before and rated == ratings((on_answer,)):
            return False
        if source.late == "retrain" and after[0] != before[0]:
            if group.retrained < self.rules.retrainings:
                group.retrained += 1
            else:
                self.folded.drop("retrained often enough")
        await self._revise(
            group, members, f"late {'amend' if source.late == 'drop' else source.late}", sends=after != before
        )
        return True

    async def _fetch(self, groups: Iterable[Group]) -> None:
        offsets = {offset for group in groups for offset in group.offsets()} - self.fetched.keys()
        if offsets:
            self.fetched |= await self.blocks_at(sorted(offsets))

    async def _reopened(self, group: Group, num_revisions: int, is_back: bool) -> list[Experience] | None:
        """Members of a closed group for a further revision; None, with a counted drop, at the limit. num_revisions: earlier
        revisions of the same kind. is_back: for a retraction, which has no limit.
        """
        if num_revisions >= self.rules.revisions and not is_back:
            self.folded.drop("revised often enough")
            return None
        await self._fetch([group])
        try:
            return members_at(group.attempts[group.winner].places(done_only=True), self.fetched.__getitem__)
        except KeyError:
            self.folded.drop("answer no longer in the log")
            return None

    async def _revise(self, group: Group, members: Sequence[Experience], reason: str, *, sends: bool = True) -> None:
        group.revision += 1
        numbers = {"revision": group.revision, "retrained": group.retrained}
        revised = [msgspec.structs.replace(member, **numbers) for member in members]
        await self._judge(group, revised, reason, sends=sends)

    async def _judge(self, group: Group, members: Sequence[Experience], reason: str, *, sends: bool = True) -> None:
        attempt, rules = group.attempts[group.winner], self.rules
        waits = attempt.lane in rules.waiting
        usual = functools.partial(usual_value, self.state.memories, tenant_in(group.id))
        given = [
            learned(group, member, rules.sources, waits, self._open_text, usual)
            for member in members
            if not member.lost
        ]
        context = Context(record_offset=self.arrival.offset, memories=self.state.memories)
        decision = await judged(group, attempt, members, given, reason, chain=self.chain, context=context)
        if sends:
            group.lane = decision.closure.lane if decision.closure.outcome == "buffered" else None
            if not group.revision:  # a later closure repeats the drops; markers were counted when they arrived
                for label, count in (Counter(decision.closure.drops) - attempt.drops()).items():
                    self.folded.drop(label, count)
        else:
            decision = Decision(msgspec.structs.replace(decision.closure, reason="rated again", experiences=0))
        if group.join and group.revision:
            decision = joined_again(decision, group.join)
        self.folded.decisions.append(decision)

    @property
    def _open_text(self) -> OpenText | None:
        return self.rules.open_text if self.rules.corrects else None

    async def _brought(self, attempt: Attempt) -> list[Experience]:
        places = attempt.places(done_only=True)
        await self.state.frames.bring(places)
        return members_at(places, self.state.frames.get)
