"""Kills and stops real processes around a real broker at random moments, and says whether the promises held.

    python -m tests.e2e.crash_loop --kills 50 --seed 1 [--minutes 30] [--dir FOLDER]

The demo's roles, through the torch engine. A shot is SIGKILL, or SIGSTOP and SIGCONT after up to 15 s, of a role or of the
broker. Then the run drains, and a line of JSON accounts for every id that an independent reader saw acknowledged.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from infra.cli.connect import connected
from infra.cli.demo.demo import load_children, prepare, write_settings
from infra.cli.demo.record import RunRecord
from infra.cli.demo.settings import DemoOptions, task_of
from infra.cli.options import SettingsFile
from infra.cli.run.up import broker_child, role_child
from infra.cli.settings import Settings, load_settings
from infra.ledger.account import audit
from infra.local.supervisor import Supervisor
from infra.log.log import Log
from schemas import Batch, Block, PolicyEvent, Progress, topics
from schemas.errors import BrokerUnavailable
from schemas.journal import JournalRecord, effective
from tests.actors.rig import until

SOURCES = (topics.EXPERIENCES, topics.EXPERTS)
TARGETS = ("train", "process", "explore", "master", "kafka")
# What a role says of itself before it works; anything else in a report means that it is back.
NOT_YET = frozenset({"loading", "starting"})
LONG_STOP_S = 15.0  # past the session time-out of a consumer group: the process comes back as a zombie
RECOVER_S = 180.0
PAUSE_S = (0.5, 6.0)  # between shots
# Nothing is measured on the model here: a short warm-up (that still draws every demonstration), no evaluations, no end
# but ours. It is written into the run's own file, where a replay finds it.
CHANGES = (
    (r"^min_steps = .*", "min_steps = 100"),
    (r"^stop_at = .*", "stop_at = 0.1"),
    (r"^checkpoint_every = .*", "checkpoint_every = 5"),
    (r"^reissue_s = .*", "reissue_s = 8.0"),
    (r"^evals = \[.*?^\]", "evals = []"),
    (r"^\[master\.stop\].*?^after = \S+", '[master.stop]\nafter = "600m"'),
)
# A master that begins with a stop rule that held long ago; it must not take the drain for one that has taken too long.
FINISH = ('master.stop={after="1s"}', 'master.drain="600m"')


class Acknowledged:
    """Follows what actors publish while everything around it is killed; every id is in the file before the next read."""

    def __init__(self, log: Log, path: Path) -> None:
        self.ids: set[str] = set()
        self._log = log
        self._path = path
        self._closing = asyncio.Event()

    async def follow(self) -> None:
        """Read until `finish` is called and the end is reached."""
        with self._path.open("w", encoding="utf-8") as file:
            async with asyncio.TaskGroup() as tasks:
                for topic in SOURCES:
                    tasks.create_task(self._follow(topic, file))

    def finish(self) -> None:
        """Nobody publishes any more."""
        self._closing.set()

    async def _follow(self, topic: topics.Topic, file: IO[str]) -> None:
        reader = await self._log.assigned(topic, "beginning")
        try:
            while True:
                last = self._closing.is_set()
                try:
                    messages = await self._log.read(reader, timeout_s=1.0)
                except BrokerUnavailable:  # it was killed, and comes back
                    continue
                for message in messages:
                    assert isinstance(message.value, Block), message.error
                    ids = [experience.id for experience in message.value.experiences if not experience.suite]
                    self.ids.update(ids)
                    file.writelines(f"{item}\n" for item in ids)
                file.flush()
                if last and not messages:
                    ends = await self._log.bus.end_offsets(self._log.name(topic))
                    if all(reader.positions().get(at, 0) >= end for at, end in ends.items()):
                        return
        finally:
            await reader.close()


async def lost(log: Log, acknowledged: set[str]) -> set[str]:
    """Acknowledged ids that the log no longer holds; the audit says what became of the others."""
    stored: set[str] = set()
    for topic in SOURCES:
        async for message in log.scan(topic):
            if isinstance(message.value, Block):
                stored |= {experience.id for experience in message.value.experiences}
    return acknowledged - stored


@dataclass(frozen=True)
class Shot:
    """A fault and its target. target: "" for none, once all targets so far are back. after_s: since the shot before. stop_s: 0
    kills, else the length of a SIGSTOP.
    """

    target: str
    after_s: float
    stop_s: float


@dataclass
class RolesSeen:
    """The roles as the log shows them: the newest report of each, and the time of the last append (wall seconds). fired:
    targets of the shots so far, and when (wall seconds).
    """

    reports: dict[str, tuple[str, str, float]] = field(default_factory=dict)
    heard_s: float = 0.0
    fired: list[tuple[str, float]] = field(default_factory=list)


def plan_shots(kills: int, seed: int, pause_s: tuple[float, float]) -> list[Shot]:
    """Every target once in each five, in random order; one shot in four is a stop, one in sixteen a long one."""
    chosen = random.Random(seed)
    shots: list[Shot] = []
    while len(shots) < kills:
        for target in chosen.sample(TARGETS, len(TARGETS)):
            dice = chosen.random()
            stop_s = 0.0 if dice > 0.25 else LONG_STOP_S if dice < 0.06 else chosen.uniform(0.2, 5.0)
            shots.append(Shot(target, chosen.uniform(*pause_s), stop_s))
    return shots[:kills]


def role_pid(folder: Path, role: str) -> int | None:
    """Process id of a role of the demo in `folder`, found as `ps` would."""
    wanted = f"infra.cli.main {role} --config {folder}" if role != "kafka" else f"kafka.Kafka {folder}"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if wanted in words and "parent_watch" not in words:
                return int(entry.name)
    return None


def last_words(folder: Path) -> str:
    """The ends of all role logs, for a failed run."""
    logs = sorted(folder.glob("logs/*.log"))
    return "".join(f"\n== {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)


def shoot(folder: Path, shot: Shot) -> int:
    """Send the first signal, once there is a process to send it to; returns that."""
    deadline = time.monotonic() + RECOVER_S
    while time.monotonic() < deadline:
        pid = role_pid(folder, shot.target)
        try:
            if pid is not None:
                os.kill(pid, signal.SIGSTOP if shot.stop_s else signal.SIGKILL)
                return pid
        except ProcessLookupError:
            continue
        time.sleep(0.05)
    raise AssertionError(f"no {shot.target} to shoot at within {RECOVER_S:g} s")


async def follow_reports(log: Log, seen: RolesSeen) -> None:
    """Keep `seen` up to date, whatever happens to the broker."""
    while True:
        try:
            async for message in log.tail(topics.REPORTS, "beginning"):
                seen.heard_s = message.timestamp_ms / 1000
                if isinstance(message.value, Progress):
                    report = message.value
                    seen.reports[report.role] = (report.instance, report.state, seen.heard_s)
        except BrokerUnavailable:
            continue


async def recovered(seen: RolesSeen, shot: Shot, pid: int, at_s: float) -> float:
    """Seconds until the target worked again: another process of the role, or the same one after a stop, has reported."""
    while (now_s := time.time()) < at_s + RECOVER_S:
        if shot.target == "kafka":
            back = seen.heard_s > at_s + 0.5
        else:
            instance, state, heard_s = seen.reports.get(shot.target, ("", "loading", 0.0))
            other = bool(shot.stop_s) or not instance.endswith(f"/{pid}")
            back = heard_s > at_s and other and state not in NOT_YET
        if back:
            say(f"{shot.target} back after {now_s - at_s:.1f} s")
            return max(0.0, now_s - at_s)
        await asyncio.sleep(0.05)
    raise AssertionError(
        f"{shot} of pid {pid} at {at_s:.0f}: not back within {RECOVER_S:g} s; last heard {seen.reports}"
    )


async def fire(folder: Path, shots: Sequence[Shot], seen: RolesSeen, until_s: float) -> list[float]:
    """All shots, some of them while earlier targets are still coming back; returns the recovery times."""
    recovering: dict[str, asyncio.Task[float]] = {}
    times: list[float] = []
    for shot in shots:
        await asyncio.sleep(shot.after_s)
        if shot.target in recovering:
            times.append(await recovering.pop(shot.target))
        if time.monotonic() > until_s:
            break
        if not shot.target:
            times += await asyncio.gather(*recovering.values())
            recovering.clear()
            seen.fired.append(("", time.time()))
            continue
        pid = await asyncio.to_thread(shoot, folder, shot)
        seen.fired.append((shot.target, time.time()))
        say(f"{shot.target} pid {pid} " + (f"stopped for {shot.stop_s:.1f} s" if shot.stop_s else "killed"))
        if shot.stop_s:
            await asyncio.sleep(shot.stop_s)
            os.kill(pid, signal.SIGCONT)
        recovering[shot.target] = asyncio.create_task(recovered(seen, shot, pid, time.time()))
    times += await asyncio.gather(*recovering.values())
    return times


async def follow_run(log: Log, record: RunRecord) -> None:
    """Take in what comes, until cancelled."""
    while True:
        await record.read_on(log)
        await asyncio.sleep(0.5)


def changed_settings(options: DemoOptions, changes: Sequence[tuple[str, str]]) -> Path:
    """The demo's settings with CHANGES and others."""
    config = write_settings(options)
    text = config.read_text()
    for wanted, changed in (*CHANGES, *changes):
        text, times = re.subn(
            wanted, changed, text, flags=re.MULTILINE | re.DOTALL if "\\[" in wanted else re.MULTILINE
        )
        assert times == 1, f"{wanted} stands {times} times in {config}"
    config.write_text(text)
    return config


async def crash_loop(
    folder: Path,
    shots: Sequence[Shot],
    *,
    seed: int,
    minutes: float,
    changes: Sequence[tuple[str, str]] = (),
    replays: bool = True,
) -> dict[str, object]:
    """Run everything; returns what the JSON line says. changes: of settings, beside CHANGES."""
    options = DemoOptions(directory=folder, task="add", engine="torch", seed=seed)
    config = changed_settings(options, changes)
    settings = load_settings(config)
    broker = broker_child(settings)
    assert broker is not None
    loads = load_children(settings, config)
    roles = [role_child(settings, SettingsFile(config), role) for role in TARGETS if role != "kafka"]
    record, seen = RunRecord(started_s=time.time()), RolesSeen()
    async with Supervisor([broker]) as first:
        await prepare(settings, first, task_of(options.task))
        async with connected(settings) as log, Supervisor([*roles, *loads]) as running:
            acknowledged = Acknowledged(log, folder / "acknowledged.txt")
            following = [asyncio.create_task(follow_reports(log, seen)), asyncio.create_task(follow_run(log, record))]
            keeping = asyncio.create_task(acknowledged.follow())
            await until(lambda: len(record.published) > 2, seconds=240.0)
            started_s = time.monotonic()
            until_s = started_s + minutes * 60
            times = await fire(folder, shots, seen, until_s)
            say("draining")
            await running.stop("master")
            finish = role_child(settings, SettingsFile(config, [*FINISH]), "master")
            async with Supervisor([finish]):
                await until(lambda: record.done, seconds=300.0)
            await running.stop()
            acknowledged.finish()
            await keeping
            for task in following:
                task.cancel()
            found = await judged(log, settings, acknowledged.ids)
            restarts = {name: state.restarts for name, state in running.states.items() if state.restarts}
            restarts |= {"kafka": first.states["kafka"].restarts}
    fired = [shot for shot in shots[: len(seen.fired)] if shot.target]
    stopped = sum(1 for shot in fired if shot.stop_s)
    return {
        "kills": len(fired) - stopped, "stops": stopped, "shots": dict(Counter(shot.target for shot in fired)),
        "fired": seen.fired, "seed": seed, **found, "restarts": restarts, "recovery_s_p50": percentile(times, 0.5),
        "recovery_s_p95": percentile(times, 0.95), "recovery_s_max": round(max(times, default=0.0), 1),
        "minutes": round((time.monotonic() - started_s) / 60, 1), "replay_equal": replays and await replayed_equal(config),
    }  # fmt: skip


async def judged(log: Log, settings: Settings, acknowledged: set[str]) -> dict[str, object]:
    """Verdict on the log at the end."""
    run = settings.run or settings.app
    account, missing = await audit(log, run), await lost(log, acknowledged)
    journal = [message.value async for message in log.scan(topics.BATCHES)]
    entries, _ = effective([entry for entry in journal if isinstance(entry, JournalRecord)], run)
    steps = [entry for entry in entries if isinstance(entry, Batch) and entry.phase == "train"]
    stale = [
        item.id
        for step in steps
        for item in step.items
        if item.lane == "usual" and step.version - item.min_version > settings.pacing.max_staleness
    ]
    events = [message.value async for message in log.scan(topics.POLICIES)]
    published = {event.version for event in events if isinstance(event, PolicyEvent) and event.event == "published"}
    for title, ids in (("lost", missing), ("pending", account.pending_ids), ("twice", account.trained_twice)):
        if ids:
            say(f"{title}: {sorted(ids)[:10]}")
    return {
        "acknowledged": len(acknowledged),
        "lost": len(missing),
        "trained_twice": len(account.trained_twice),
        "pending": account.pending,
        "stale": len(stale),
        "trained": account.trained,
        "dropped": account.dropped,
        "steps": len(steps),
        "versions": len(published),
        "audit_clean": account.is_clean,
    }


async def replayed_equal(config: Path) -> bool:
    """True if `headrace replay --verify` gives the run's bits, as it promised."""
    command = (sys.executable, "-m", "infra.cli.main", "replay", str(config.parent), "--verify", "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    words, _ = await process.communicate()
    say(f"replay: {words.decode(errors='replace').strip()[-600:]}")
    if process.returncode:
        return False
    found = json.loads(words)
    return bool(found["equal"] and found["bits_promised"] and found["checkpoints"])


def say(line: str) -> None:
    """To stderr: the one line on stdout is the report."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return round(sorted(values)[max(0, math.ceil(share * len(values)) - 1)], 1) if values else 0.0


def main() -> int:
    """Exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="signals to send, stops among them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120.0, help="fire no longer than this")
    parser.add_argument("--dir", type=Path, help="keep the run's folder here (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crash-loop-") as temporary:
        folder = (options.dir or Path(temporary) / "run").resolve()
        shots = plan_shots(options.kills, options.seed, PAUSE_S)
        loop = crash_loop(folder, shots, seed=options.seed, minutes=options.minutes)
        report = asyncio.run(loop)
    print(json.dumps(report))
    promised = ("lost", "trained_twice", "pending")
    broken = any(report.get(name) for name in promised) or not report["audit_clean"]
    return 1 if broken or not report["replay_equal"] else 0


if __name__ == "__main__":
    sys.exit(main())
