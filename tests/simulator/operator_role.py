"""The operator: moves the channels by hand at moments of chance, as `headrace promote`, `pin` and `rollback` do."""

import asyncio
from random import Random

from infra.cli.govern.channel import check_move, servable
from infra.cli.govern.words import recent_words
from infra.log.log import Log
from schemas import PolicyEvent
from schemas.errors import ConfigError
from schemas.fields import Channel, PolicyEventKind
from schemas.topics import POLICIES
from tests.simulator.scenario import FAULTS_S, Scenario

OWNER = "operator"
Move = tuple[PolicyEventKind, Channel]
MOVES: tuple[Move, ...] = (("promoted", "stable"), ("pinned", "stable"), ("rolled_back", "stable"))
TRIALS: tuple[Move, ...] = (("promoted", "canary"), ("promoted", "canary"), ("held", "stable"))
UNPINNED = -1


async def run_operator(scenario: Scenario, log: Log) -> None:
    """All moves of one seed, in time; one that the command would refuse is not made."""
    random = Random(f"operator/{scenario.seed}")
    begin_s = asyncio.get_running_loop().time()
    plan = [
        (random.random() * FAULTS_S, moves) for moves in [MOVES] * scenario.num_moves + [TRIALS] * scenario.num_trials
    ]
    for at_s, moves in sorted(plan):
        await asyncio.sleep(max(0.0, begin_s + at_s - asyncio.get_running_loop().time()))
        policy = scenario.floor.policy.name
        words = await recent_words(log, policy, at_least=None)
        history, stable = words.events, words.stable
        kind, channel = random.choice(moves)
        newest = max((event.version for _, event in history if event.event == "published"), default=0)
        version = UNPINNED if kind == "pinned" and stable.pinned else random.randint(0, newest)
        if kind == "held" and (version := stable.trial) < 0:
            continue
        try:
            check_move(servable(history), stable, kind, version)
        except ConfigError:
            continue
        move = PolicyEvent(event=kind, policy=policy, version=version, channel=channel, owner=OWNER)
        await log.publish(POLICIES, move)
