"""What each simulated process runs: the real role, on its own connections to the log, the store and the clock."""

import functools
from collections.abc import Coroutine
from typing import TYPE_CHECKING

import msgspec

from actors.gateway.gateway import RequestIdGenerator
from actors.gateway.serve import run_gateway
from actors.master.master import run_master
from actors.rollout.explorer import run_explorer
from infra.observe.metrics import Metrics
from infra.roles.role import Role
from tests.role import role_of
from tests.simulator.gateway_life import GatewayLife, next_folder
from tests.simulator.light_metrics import LightMetrics
from tests.simulator.plugins import EOS, SmallTokenizer, TableLearner, WatchedEngine
from tests.simulator.scenario import TOKEN_S
from tests.simulator.virtual_loop import Process
from tests.simulator.worker_role import run_streams
from trainer.train import run_trainer

if TYPE_CHECKING:
    from tests.simulator.world import World

Running = Coroutine[None, None, None]


def given(world: "World", process: Process, metrics: Metrics) -> Role:
    """What every role is given."""
    log = world.log_of(process)
    assert log.store is not None
    return role_of(
        process.name,
        world.scenario.floor,
        log,
        log.store,
        metrics=metrics,
        stop=world.stop_of(process),
        instance=process.name,
    )


def master(world: "World", process: Process) -> Running:
    """See run_master."""
    return run_master(given(world, process, LightMetrics("master")), world.scenario.master, finish=world.finish)


def explorer(world: "World", process: Process) -> Running:
    """See run_explorer."""
    role = given(world, process, world.metrics_of(process))
    loaded, seed = functools.partial(world.watch.loaded, process), world.draw_seed()
    engine = WatchedEngine(loaded, seed=seed, token_s=0.2 + 0.6 * world.random.random())
    return run_explorer(role, world.scenario.explore, engine, SmallTokenizer(), (EOS,))


def trainer(world: "World", process: Process) -> Running:
    """See run_trainer."""
    scenario = world.scenario
    stepping = functools.partial(world.watch.stepping, process)
    learner = TableLearner(stepping, scenario.fail_at, scenario.poison_at)
    return run_trainer(given(world, process, LightMetrics("train")), scenario.trainer, learner, seed=scenario.seed)


def gateway(world: "World", process: Process) -> Running:
    """See run_gateway; a canary by its name."""
    role, config = process.name.partition("#")[0], world.scenario.gateway
    config = config.as_canary() if role == "canary" else config
    life = world.gateways[process] = GatewayLife(
        role,
        next_folder(world.folder, world.gateways, role),
        WatchedEngine(functools.partial(world.watch.loaded, process), seed=world.draw_seed(), token_s=TOKEN_S),
    )
    floor = msgspec.structs.replace(world.scenario.floor, folder=life.folder)
    given_here = msgspec.structs.replace(given(world, process, world.metrics_of(process)), floor=floor)
    return run_gateway(given_here, config, life.engine, SmallTokenizer(), ids=RequestIdGenerator(world.draw_seed()))


def worker(world: "World", process: Process) -> Running:
    """See run_streams."""
    index = next(n for n in range(100) if n not in world.workers or world.workers[n].is_dead)
    world.workers[index] = process
    folder = world.folder / f"worker-{index}"
    if world.mixture.lost_disks and world.random.random() < 0.4 and folder.exists():
        world.watch.happened(process, "finds an empty disk")
        folder = world.folder / f"worker-{index}-{process.name}"
    skew_ms = world.mixture.skew_ms
    wall_ms = lambda: world.cluster.now_ms() + skew_ms  # noqa: E731
    metrics = world.metrics[process] = LightMetrics("process")
    return run_streams(world.scenario, world.log_of(process), metrics, folder, wall_ms)
