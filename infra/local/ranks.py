"""The ranks of one trainer on one machine: started together, stopped together, and together again when one dies.

    group      waits for  the first of its processes to end
    rank 0 done           it has asked the others to end; a rank that stays is killed
    another one done      rank 0 asked it to, and is about to end; it has as long as a stop may take
    anyone dead           the group cannot go on (its next collective would wait for ever): all are killed, and start again

Guarantee: a new group begins only when nothing is left of the old one. Rank 0 alone touches the log; what it had journaled
and checkpointed is where the new group continues.

torchrun's own restart does not replace this on one machine: it starts settings that are wrong again, leaves its ranks behind
when it is killed, waits for ever for one that stays when rank 0 is done, and counts restarts over a whole run, not in a row.
Over several machines torchrun starts the ranks.
"""

import asyncio
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from infra.local.process import Watched, start_watched
from infra.local.supervisor import FIRST_BACKOFF_S, HEALTHY_S, MAX_BACKOFF_S

logger = logging.getLogger(__name__)

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
POLL_S = 0.2


class RankGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Command of a group of ranks. log: folder, one file per rank. final_codes: 0, and those no restart can mend.

    max_failures: deaths in a row, each within HEALTHY_S of its start. stop_s: from SIGTERM to SIGKILL.
    """

    argv: tuple[str, ...]
    num_ranks: int
    log: Path
    env: dict[str, str] = {}
    final_codes: tuple[int, ...] = (0,)
    max_failures: int = 20
    stop_s: float = 30.0


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """Rank that a launcher (headrace's own, or torchrun) gave this process; None without one."""
    return int(environment.get(RANK, "0")) if WORLD_SIZE in environment else None


async def run_ranks(group: RankGroup, stop: asyncio.Event) -> int:
    """Keep the ranks running until rank 0 has done its work, or `stop`; returns the exit code of the group."""
    failures = 0
    while True:
        started_s = time.monotonic()
        code, who = await _run_group(group, stop)
        if stop.is_set() or (code in group.final_codes and (code or who == 0)):
            return 0 if stop.is_set() else code
        failures = 1 if time.monotonic() - started_s > HEALTHY_S else failures + 1
        if failures > group.max_failures:
            logger.error("ranks given up after %d failures in a row code=%d", failures - 1, code)
            return code or 1
        backoff_s = min(FIRST_BACKOFF_S * 2 ** (failures - 1), MAX_BACKOFF_S)
        logger.warning(
            "rank %d ended code=%d; all %d ranks start again in %.1f s", who, code, group.num_ranks, backoff_s
        )
        try:
            async with asyncio.timeout(backoff_s):
                await stop.wait()
            return 0
        except TimeoutError:
            continue


async def _run_group(group: RankGroup, stop: asyncio.Event) -> tuple[int, int]:
    """One life of the group: exit code of the process that ended it, and its rank."""
    ranks = _start(group)
    try:
        ending = False
        deadline_s = leaving_s = float("inf")
        while True:
            ended = [(rank, watched.process.poll()) for rank, watched in enumerate(ranks)]
            if ended[0][1] == 0:  # it has asked the others to end
                await asyncio.to_thread(_wait_for_all, ranks, group.stop_s)
                return 0, 0
            for rank, code in ended:
                if code:
                    return code, rank
            if left := [rank for rank, code in ended if code == 0]:  # asked to end by rank 0, which is about to
                leaving_s = min(leaving_s, time.monotonic() + group.stop_s)
                if time.monotonic() > leaving_s:
                    return 0, left[0]
            if stop.is_set() and not ending:
                ending, deadline_s = True, time.monotonic() + group.stop_s
                ranks[0].process.send_signal(signal.SIGTERM)
            if time.monotonic() > deadline_s:
                logger.warning("ranks did not end within %.0f s of SIGTERM", group.stop_s)
                return -signal.SIGKILL, 0
            await asyncio.sleep(POLL_S)
    finally:
        for watched in ranks:
            watched.kill_group()
        for watched in ranks:
            await asyncio.to_thread(watched.process.wait)
            watched.release()


def _start(group: RankGroup) -> list[Watched]:
    with socket.socket() as free:  # a port of its own for every life: the old one may linger
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {WORLD_SIZE: str(group.num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started: list[Watched] = []
    try:
        for rank in range(group.num_ranks):
            own = {RANK: str(rank), "LOCAL_RANK": str(rank)}
            log = group.log / f"train-rank-{rank}.log"
            started.append(start_watched(group.argv, log=log, env={**group.env, **world, **own}))
    except BaseException:
        for watched in started:
            watched.kill_group()
        raise
    logger.info("ranks started pids=%s", [watched.pid for watched in started])
    return started


def _wait_for_all(ranks: Sequence[Watched], within_s: float) -> None:
    """Until all have ended, or the time is up. Blocking."""
    deadline_s = time.monotonic() + within_s
    for watched in ranks:
        try:
            watched.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("rank did not end within %.0f s of rank 0 pid=%d", within_s, watched.pid)
