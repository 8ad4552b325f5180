"""Running one role in this process: settings in, until a signal or the role's own end."""

import asyncio
import logging
import os
import signal
from pathlib import Path

from infra.cli.connect import bootstrap_of, connected, log_to_stderr, store_of
from infra.cli.settings import Settings, load_settings
from infra.metrics import Metrics
from infra.plugin import add_plugin_folders
from schemas.errors import ConfigError

logger = logging.getLogger(__name__)


async def run_role(role: str, config: Path, sets: list[str]) -> int:
    """Run `role` until SIGTERM or SIGINT. Raises ConfigError, BrokerUnavailable and what else must be loud."""
    settings = load_settings(config, sets)
    log_to_stderr()
    add_plugin_folders(settings.folder, settings.plugins)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics(role)
    port = metrics.serve(int(os.environ.get("HEADRACE_METRICS_PORT", "0")))
    logger.info("started role=%s pid=%d metrics_port=%s", role, os.getpid(), port)
    await {"master": _master, "explore": _explore, "process": _process, "train": _train}[role](settings, metrics, stop)
    logger.info("stopped role=%s", role)
    return 0


async def _master(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    from actors.master import run_master

    async with connected(settings) as log:
        await run_master(settings, settings.master, settings.pacing, log, metrics, stop)


async def _explore(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    folder = model_folder(settings)
    from actors.engine import Engine
    from actors.explorer import run_explorer
    from infra.model import load_tokenizer
    from infra.plugin import load

    async with connected(settings) as log:  # first: a missing broker is told in seconds, a model takes longer to load
        tokenizer = await asyncio.to_thread(load_tokenizer, folder)
        engine: Engine = load(settings.engine.use, {"model": folder, **settings.engine.options}, "engine")
        await run_explorer(
            settings,
            settings.explore,
            log=log,
            store=store_of(settings),
            engine=engine,
            tokenizer=tokenizer,
            stop_tokens=tokenizer.eos_ids,
            metrics=metrics,
            stop=stop,
        )


async def _process(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    from streams.app import run_worker

    await run_worker(
        settings,
        settings.streams(),
        bootstrap=bootstrap_of(settings),
        store=store_of(settings),
        metrics=metrics,
        stop=stop,
    )


async def _train(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    folder = model_folder(settings)  # before the imports: they take seconds, and this may be a mistake
    from trainer.learner import open_learner
    from trainer.train import run_trainer

    async with connected(settings) as log:
        learner = await asyncio.to_thread(open_learner, settings.trainer, folder)
        await run_trainer(
            settings,
            settings.trainer,
            log=log,
            store=store_of(settings),
            learner=learner,
            metrics=metrics,
            stop=stop,
            seed=settings.master.seed,
        )


def model_folder(settings: Settings) -> str:
    """The configured model: a folder beside the TOML if there is one, else a name for transformers to find."""
    if not settings.policy.model:
        raise ConfigError(f"{settings.folder}: policy.model: missing, expected a model folder or a Hugging Face name")
    folder = settings.folder / settings.policy.model
    return str(folder) if folder.is_dir() else settings.policy.model
