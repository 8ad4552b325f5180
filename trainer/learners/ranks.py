"""The ranks of one trainer on one machine: started together and stopped together.

    rank 0 done           it has asked the others to end; a rank that stays is killed
    another one done      rank 0 asked it to, and is about to end; it has as long as a stop may take
    anyone dead           the group cannot go on (its next collective would never return): all are killed

Guarantee: when the group has ended, no process of it is left. Rank 0 alone touches the log; the next group
continues from its journal and checkpoints. A supervisor restarts the role (`headrace up`, a container's policy).

torchrun does not replace this on one machine: it leaves its ranks behind when it is killed, and waits without a limit for a
rank that stays when rank 0 is done. Over several machines torchrun starts the ranks.
"""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from infra.local.process import Watched, start_watched

logger = logging.getLogger(__name__)

RANK = "RANK"
WORLD_SIZE = "WORLD_SIZE"
POLL_S = 0.2


class RankGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Command of a group of ranks. log: folder, one file per rank. stop_s: seconds from SIGTERM to SIGKILL."""

    argv: tuple[str, ...]
    num_ranks: int
    log: Path
    env: dict[str, str] = {}
    stop_s: float = 30.0


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """Rank that a launcher (headrace's own, or torchrun) gave this process; None without one."""
    return int(environment.get(RANK, "0")) if WORLD_SIZE in environment else None


async def run_ranks(group: RankGroup, stop: asyncio.Event) -> int:
    """Run the ranks until rank 0 has done its work, a rank dies, or `stop`; returns the exit code of the group."""
    ranks = _start(group)
    ending = False
    deadline_s = float("inf")
    try:
        while True:
            codes = [watched.process.poll() for watched in ranks]
            is_done = stop.is_set() or codes[0] == 0  # rank 0 has asked the others to end
            if codes[0] == 0 and None not in codes:
                return 0
            if codes[0] != 0 and (dead := [(rank, code) for rank, code in enumerate(codes) if code]):
                logger.warning("ranks ended codes=%s; the others are killed", dead)
                return 0 if is_done else max(1, dead[0][1])
            if stop.is_set() and not ending:
                ending = True
                ranks[0].process.send_signal(signal.SIGTERM)
            if is_done or 0 in codes:  # a rank that rank 0 asked to end was sooner
                deadline_s = min(deadline_s, time.monotonic() + group.stop_s)
            if time.monotonic() > deadline_s:
                logger.warning("ranks did not end within %.0f s", group.stop_s)
                return 0 if is_done else 1
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
