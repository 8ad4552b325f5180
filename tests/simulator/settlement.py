"""After the drain: the whole log and every master's snapshot against independent readings of the log."""

import hashlib
from collections import Counter
from collections.abc import Container
from typing import Any

from actors.master.evaluation import parse_eval_group
from actors.master.master import take_in
from actors.master.plan import Plan
from actors.master.snapshot import Unfit, restore, series
from infra.ledger.account import Account
from infra.log.log import LogMessage
from infra.observe.metrics import Metrics
from infra.store.memory import MemoryStore
from infra.store.snapshots import candidates
from schemas import Batch, Block, Closure, DeadLetter, DropMarker, Fence, PolicyEvent, Rollback, Task, topics
from schemas.experience import is_withdrawal
from schemas.fields import VERSION_PASSED
from schemas.topics import Topic, topic_name
from tests.simulator.collect_model import CollectModel, Expected
from tests.simulator.plugins import TableLearner
from tests.simulator.scenario import APP, DEADLINE_S, SESSION_S, WINDOW_S
from tests.simulator.settlement_serving import settle_serving
from tests.simulator.watch import content_of
from tests.simulator.world import World
from trainer.batch.assemble import learning_rate_at, train_items
from trainer.batch.batch import pack
from trainer.journal import journal

Logged = dict[str, list[tuple[Any, Any]]]
FOLLOWED = (topics.TASKSET, topics.POLICIES, topics.EVALS, topics.PROGRESS, topics.REPORTS)
METRICS = Metrics("settlement")
WHOLE = "a snapshot is whole"


def settle_snapshots(world: World, log: Logged) -> None:
    """Complain about each from which a master would decide otherwise."""
    if not world.watch.snapshots:
        return
    begun = _begun(world)
    raced = raced_evals(log)
    told = facts(_read(_plan(world), log, {}), raced)
    store = MemoryStore()
    for key, data in world.watch.snapshots.items():
        store.put(key, data)
    for snapshot in candidates(store, series(APP), lambda reason, line: world.watch.complain(WHOLE, line)):
        key, plan = snapshot.key, _plan(world)
        try:
            places = restore(store, snapshot, plan, world.scenario.floor.policy.name, begun)
        except Unfit as error:
            world.watch.complain(WHOLE, f"{key}: {error}")
            continue
        found = facts(_read(plan, log, places), raced)
        for name, value in found.items():
            if value != told[name]:
                promise = "a master from a snapshot decides as one that read everything"
                world.watch.complain(promise, f"{key}: {name}: {value}, in the log {told[name]}")


def raced_evals(log: Logged) -> set[tuple[str, int]]:
    """Evals with a task that has an answer in one topic and a refusal in another: the record that a master reads first
    decides.
    """
    refused = {
        value.group
        for _, value in log[topics.PROGRESS.name]
        if isinstance(value, Closure) and value.reason == VERSION_PASSED
    }
    answered = {value.group for _, value in log[topics.EVALS.name] if isinstance(value, Block)}
    return {(found[0], found[1]) for group in refused & answered if (found := parse_eval_group(group)) is not None}


def facts(plan: Plan, raced: Container[tuple[str, int]] = ()) -> dict[str, object]:
    requests = plan.evals.requests
    return {
        "outstanding": {
            name: (item.attempt, item.buffered) for name, item in sorted(plan.admission.outstanding.items())
        },
        "next number": plan.admission.next_sequence,
        "pacing": (plan.admission.version, plan.admission.steps_at_version),
        "rounds": {task: plan.book.next_round(task) for task in sorted(plan.book.tasks)},
        "evals": {
            key: (item.missed, item.result, item.answers)
            for key, item in sorted(requests.items())
            if key not in raced and (item.attempts or not item.open)
        },
        "channel": plan.gate.stable,
        "newest": plan.feed.newest,
        "paused": (plan.paused, plan.drained_by, plan.drain_offset),
    }


def _plan(world: World) -> Plan:
    scenario, newest = world.scenario, 10**6
    return Plan(scenario.master, scenario.floor.pacing, policy=scenario.floor.policy.name, token=newest)


def _read(plan: Plan, log: Logged, places: Any) -> Plan:
    """`tasks` first and then the others, as `run_master` does."""
    issued = []
    for record, value in log[topics.TASKS.name]:
        if isinstance(value, Task) and value.issued and record.offset >= _at(places, topics.TASKS, record):
            plan.tick(record.timestamp_ms)
            issued.append(value.issued)
    if places:
        plan.issued_since(issued)
    else:
        for item in issued:
            plan.issued(item)
    left = [
        (record, value)
        for topic in FOLLOWED
        for record, value in log[topic.name]
        if topic is topics.TASKSET or record.offset >= _at(places, topic, record)
    ]
    for record, value in sorted(left, key=lambda entry: entry[0].timestamp_ms):
        if not isinstance(value, bytes):
            take_in(plan, METRICS, LogMessage(record, value=value))
    plan.caught_up()
    return plan


def _at(places: Any, topic: topics.Topic, record: Any) -> int:
    return int(places.get(topic.name, {}).get(record.partition, 0))


def _begun(world: World) -> str:
    first = world.records(topics.POLICIES)[0]
    assert first.topic == topic_name(APP, topics.POLICIES)
    return hashlib.blake2b(b"%d:" % first.timestamp_ms + first.value, digest_size=16).hexdigest()


def settle(world: World) -> None:
    """Complain about everything that does not hold."""
    log = {
        topic.name: [(record, world.watch.read(record.value)) for record in world.records(topic)]
        for topic in topics.ALL
    }
    check_account(world, log)
    check_journal(world, log)
    check_replay(world, log)
    check_collect(world, log)
    check_letters(world, log)
    settle_serving(world, log)
    settle_snapshots(world, log)


def values(log: Logged, topic: Topic, kind: type) -> list[Any]:
    """Records of one kind, in order."""
    return [value for _, value in log[topic.name] if isinstance(value, kind)]


def members(log: Logged, topic: Topic) -> dict[str, Any]:
    """Experiences by id, as last stored."""
    return {member.id: member for block in values(log, topic, Block) for member in block.experiences}


def effective(log: Logged, run: str) -> list[Any]:
    """The journal as the design says: tokens below a fence count for nothing, the first of (token, step) wins."""
    fence, seen, found = -1, set(), []
    for _, entry in log[topics.BATCHES.name]:
        if isinstance(entry, Fence):
            fence = max(fence, entry.token)
            continue
        step = entry.to_step if isinstance(entry, Rollback) else entry.step
        key = (type(entry), entry.token, step)
        if entry.token >= fence and key not in seen:
            seen.add(key)
            found.append(entry)
    return found


def check_account(world: World, log: Logged) -> None:
    """I1: every acknowledged experience or stub is in the log, and has a fate."""
    account = world.account
    assert isinstance(account, Account)
    stored = members(log, topics.EXPERIENCES).keys() | members(log, topics.EXPERTS).keys()
    if lost := sorted(world.watch.acknowledged - stored):
        world.watch.complain("I1 acknowledged", f"not in the log: {lost}")
    stubs = {record.id for record in values(log, topics.VERIFIED, DropMarker)}
    if lost := sorted(world.watch.acknowledged_stubs - stubs):
        world.watch.complain("I1 acknowledged", f"stubs not in the log: {lost}")
    if not account.is_clean:
        world.watch.complain("I2 audit", f"trained twice {account.trained_twice}, unknown {account.unknown}")


def check_journal(world: World, log: Logged) -> None:
    """I2: (id, use) is unique in a lane, except where late feedback has it trained again; uses count from 0; the journal's
    own readers count the same records as the design.
    """
    counting = effective(log, world.scenario.floor.app)
    read_as, _ = journal.effective([entry for _, entry in log[topics.BATCHES.name]], world.scenario.floor.app)
    if more := [entry for entry in read_as if entry not in counting]:
        world.watch.complain("fencing", f"readers of the journal count what an overtaken trainer wrote: {more}")
    batches = [entry for entry in counting if isinstance(entry, Batch)]
    uses = Counter((item.id, item.revision, item.lane, item.use) for batch in batches for item in batch.items)
    if twice := [key for key, count in uses.items() if count > 1]:
        world.watch.complain("I2 unique", f"trained twice: {twice}")
    amended = Counter((id, lane, use) for id, _, lane, use in uses)
    if twice := [key for key, count in amended.items() if count > 1 and key[1] != "human"]:
        world.watch.complain("I2 unique", f"trained as two revisions: {twice}")
    for id, lane, use in amended:
        if use and (id, lane, use - 1) not in amended:
            world.watch.complain("I2 uses", f"{id} has use {use} and not {use - 1}")
    for batch in batches:
        if batch.version not in world.watch.content:
            world.watch.complain(
                "I3 visible", f"step {batch.step} trains version {batch.version}, which nobody can see"
            )
    for process, metrics in world.metrics.items():
        refused, altered = metrics.counters().get("policies_refused", 0.0), world.watch.altered[process]
        if refused > altered:
            world.watch.complain(
                "I3 verified", f"{process.name} refused {refused:g} policies, {altered} readings were altered"
            )
    steps = [batch.step for batch in batches]
    if steps != list(range(len(steps))):
        world.watch.complain("I4 steps", f"the journal counts {steps}")


def check_replay(world: World, log: Logged) -> None:
    """I4: the journal alone, from the first weights, gives every published version; a rollback undoes the steps it names."""
    blocks = {record.offset: value for record, value in log[topics.BUFFER.name]}
    scenario = world.scenario
    learner, config = TableLearner(fail_at=scenario.fail_at, poison_at=scenario.poison_at), scenario.trainer
    content = {-1: {content_of(learner.tensors())}}
    saved = {-1: learner.save()}
    first_train = -1
    if config.warmup is not None:
        learner.begin_phase("warmup")
    for entry in effective(log, scenario.floor.app):
        if isinstance(entry, Rollback):
            learner.restore(saved[entry.from_step - 1])
            step = entry.to_step
        elif isinstance(entry, Batch):
            if entry.phase == "train" and first_train < 0:
                first_train = entry.step
                learner.begin_phase("train")
                saved[first_train - 1] = learner.save()
            try:
                items = train_items(entry, blocks)
            except ValueError as error:
                world.watch.complain("I4 replay", str(error))
                return
            for item in items:
                age = entry.version - item.experience.min_version
                if item.item.lane == "usual" and age > scenario.max_staleness:
                    world.watch.complain("staleness bound", f"step {entry.step} has a token {age} versions old")
            packed = pack(items, max_tokens=config.max_tokens_per_microbatch, version=entry.version)
            rate = learning_rate_at(config, entry.phase, entry.step - first_train)
            learner.step(packed, learning_rate=rate, seed=entry.seed)
            step = entry.step
        else:
            continue
        content.setdefault(step, set()).add(content_of(learner.tensors()))
        saved[step] = learner.save()
    token = -1
    for record, event in log[topics.POLICIES.name]:
        if not isinstance(event, PolicyEvent):
            continue
        token = record.offset if event.event == "lease" else token
        if event.event != "published" or event.token < token:
            continue
        if world.watch.content.get(event.version) not in content.get(event.step, ()):
            world.watch.complain("I4 replay", f"version {event.version} is not what step {event.step} replays to")


def check_collect(world: World, log: Logged) -> None:
    """Closures and credit as the rules say, by log time alone."""
    model = CollectModel(
        deadline_ms=int(DEADLINE_S * 1000),
        window_ms=int(WINDOW_S * 1000),
        late=world.scenario.late,
        sources=tuple(source.name for source in world.scenario.streams.feedback),
        session_ms=int(SESSION_S * 1000),
    )
    for index in sorted({record.partition for record, _ in log[topics.VERIFIED.name]}):
        records = [topic for topic in log[topics.VERIFIED.name] if topic[0].partition == index]
        model.read((record.timestamp_ms, value) for record, value in records)
    told = [record for record in values(log, topics.PROGRESS, Closure) if not record.group.startswith("eval-")]
    closures = {(item.group, item.attempt, item.revision): item for item in told}
    if closures.keys() != model.expected.keys():
        world.watch.complain(
            "collect closures",
            f"missing {sorted(model.expected.keys() - closures.keys())}, too many {sorted(closures.keys() - model.expected)}",
        )
        return
    buffered: dict[tuple[str, int], dict[str, Any]] = {}
    for block in values(log, topics.BUFFER, Block):
        for member in block.experiences:
            if is_withdrawal(member):  # of the copy in another lane, in any order with the blocks of this lane
                continue
            buffered.setdefault((member.group, member.revision), {})[member.id] = member
    for key, expected in model.expected.items():
        sent = buffered.pop((key[0], key[2]), {}) if not expected.superseded else {}
        if fault := closure_fault(closures[key], expected, sent):
            world.watch.complain("collect decides by the rules", f"{key}: {fault}; {closures[key]}")
    if buffered:
        world.watch.complain("collect closures", f"in the buffer without a closure: {sorted(buffered)}")


def closure_fault(closure: Closure, expected: Expected, sent: dict[str, Any]) -> str:
    if expected.superseded or closure.outcome == "superseded":
        return "" if expected.superseded and closure.outcome == "superseded" else f"expected {expected}"
    if closure.revision == 0 and closure.drops.get("missing at deadline", 0) != expected.missing:
        return f"expected {expected.missing} missing at the deadline"
    if len(sent) != closure.experiences or not sent.keys() <= expected.members.keys():
        return f"sent {sorted(sent)}, expected {closure.experiences} of {sorted(expected.members)}"
    for id, sent_block in sent.items():
        for source in ("csat", "user"):
            given, wanted = sent_block.score(source), expected.members[id].get(source)
            if (given is None) != (wanted is None) or (given is not None and abs(given - (wanted or 0)) > 1e-12):
                return f"{id} has {source} {given}, expected {wanted}"
    return ""


def check_letters(world: World, log: Logged) -> None:
    """I6: records that cannot be read are in the dead letters."""
    letters = {
        (record.topic, record.partition, record.offset) for record in values(log, topics.DEAD_LETTERS, DeadLetter)
    }
    for topic in (topics.EXPERIENCES, topics.FEEDBACK):
        for record, value in log[topic.name]:
            if isinstance(value, bytes) and (topic.name, record.partition, record.offset) not in letters:
                world.watch.complain("I6 dead letters", f"{topic.name}/{record.partition}@{record.offset} has none")
