"""The ranks of one trainer on one machine: started together and stopped together.

    rank 0 done           it has asked the others to end; a rank that stays is killed
    another rank done     rank 0 asked it to end, and must end itself within END_S
    any rank dead         the next collective would never return: all ranks are killed

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
END_S = 30.0  # for all ranks, once one has ended


class RankGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Command of a group of ranks. log: folder, one file per rank. stop_s: from SIGTERM to SIGKILL while none has ended."""

    argv: tuple[str, ...]
    num_ranks: int
    log: Path
    stop_s: float
    env: dict[str, str] = {}


def launched_rank(environment: Mapping[str, str]) -> int | None:
    """Rank that a launcher (headrace's own, or torchrun) gave this process; None without one."""
    return int(environment.get(RANK, "0")) if WORLD_SIZE in environment else None


async def run_ranks(group: RankGroup, stop: asyncio.Event) -> int:
    """Run the ranks to the end of rank 0, a death or `stop`; returns 0 where rank 0 ended by itself or had not begun."""
    ranks = _start(group)
    deadline_s = float("inf")
    try:
        while True:
            codes = [watched.process.poll() for watched in ranks]
            if codes[0] == 0 and None not in codes:
                return 0
            if codes[0] != 0 and (dead := [(rank, code) for rank, code in enumerate(codes) if code]):
                logger.warning("ranks ended codes=%s; the others are killed", dead)
                return 0 if stop.is_set() and codes[0] == -signal.SIGTERM else max(1, dead[0][1])
            if stop.is_set() and deadline_s == float("inf"):
                ranks[0].process.send_signal(signal.SIGTERM)
                deadline_s = time.monotonic() + group.stop_s
            if 0 in codes:  # rank 0 has asked the others to end, and a rank was the first
                deadline_s = min(deadline_s, time.monotonic() + END_S)
            if time.monotonic() > deadline_s:
                logger.warning("ranks did not end in time codes=%s; the others are killed", codes)
                return 0 if codes[0] == 0 else 1
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
