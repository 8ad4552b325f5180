"""Running one role in this process: settings in, until a signal or the role's own end."""

import asyncio
import inspect
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from actors.config import ReloadConfig
from actors.gateway.config import GatewayConfig, Webhook
from infra.cli.connect import app_store, broker_address, connected, log_to_stderr
from infra.cli.exit_codes import CONFIG_ERROR, FENCED_OUT, FINAL_WORDS, root_cause
from infra.cli.options import SettingsFile, exit_with, flags
from infra.cli.run.stay_down import VARIABLE, stay_down
from infra.cli.settings import Settings
from infra.log.log import Log
from infra.observe import failpoint
from infra.observe.metrics import LISTEN_VARIABLE, Metrics
from infra.observe.release import full_release
from infra.roles.identity import require_fit
from infra.roles.memory import give_back_large_blocks, search_seldom, share_heaps
from infra.roles.process import ends_within
from infra.roles.role import Role, instance_name
from infra.settings.config import Use, split_address
from infra.settings.plugin import add_plugin_folders, find
from infra.settings.secret import read_secret
from infra.store.open import MeasuredStore
from schemas import Progress
from schemas.errors import BrokerUnavailable, ConfigError, HeadraceError, StoreError
from schemas.topics import REPORTS
from streams.config import FEEDBACK_PATH
from trainer.learners.ranks import RankGroup, launched_rank, run_ranks

if TYPE_CHECKING:
    from actors.engines.engine import Engine
    from infra.model.model import Tokenizer
    from trainer.learners.learner import Learner
    from trainer.loop.report import Board

logger = logging.getLogger(__name__)

CODE_VARIABLE = "HEADRACE_STOPPED_CODE"
SAY_S = 5.0
FIT_S = 2.0
MAX_REASON = 1000  # characters
STOP_S = 1800.0  # a trainer finishes its step and writes a checkpoint; to end it sooner, send SIGKILL


@flags
def master(chosen: SettingsFile) -> None:
    """Issue tasks as the staleness bound allows, reissue unfinished groups, request evals, and run the gate.

    Run a single master; a newer one takes the lease. It stores a snapshot of its state every `master.snapshot_s` seconds and
    reads the log from there at its next start.
    """
    _end_with("master", chosen)


@flags
def explore(chosen: SettingsFile) -> None:
    """Run tasks on an engine, publish experiences, load new versions while generating.

    Any number of explorers share the tasks. An engine loads a new version between two tokens and drops no request.

    Example: [cyan]headrace explore --set engine.use=actors.engines.torch:TorchEngine[/]
    """
    _end_with("explore", chosen)


@flags
def process(chosen: SettingsFile) -> None:
    """Run the stream processors: tasks, verify, collect and the feedback sources.

    Any number of workers share the partitions. Their decisions do not depend on crashes and rebalances.
    """
    _end_with("process", chosen)


@flags
def train(
    chosen: SettingsFile, ranks: Annotated[int, typer.Option(help="Number of ranks; 0 takes \\[trainer] ranks.")] = 0
) -> None:
    """Train on the buffer, journal every batch, publish versions.

    Run a single trainer: a second trainer takes the lease, and the first exits. After a crash it continues with the same
    batches. With several ranks (--ranks or torchrun) the first alone uses the log; if a rank dies, all ranks end.
    """
    _end_with("train", chosen, f"trainer.ranks={ranks}" if ranks else "")


@flags
def serve(
    chosen: SettingsFile,
    channel: Annotated[str, typer.Option(help='stable, canary or candidate; "" takes \\[gateway] channel.')] = "",
) -> None:
    """Serve an OpenAI-compatible API on an engine, record answers with consent, load new versions.

    Any number of gateways may run behind one address. A gateway serves while the broker is unreachable, and writes its waiting
    records afterwards. Clients need a key: headrace keys create.

    A canary listens at the address in [bold]\\[gateway.canary][/] and answers the share of sessions that other gateways send.

    Example: [cyan]headrace serve --set gateway.listen=0.0.0.0:8000[/]
    """
    _end_with("serve", chosen, f"gateway.channel={channel}" if channel else "")


def _end_with(role: str, chosen: SettingsFile, override: str = "") -> None:
    """Run a role; where a restart cannot fix its end, and VARIABLE says so, wait to be stopped."""
    chosen = SettingsFile(chosen.config, [*chosen.sets, *([override] if override else [])])
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None  # Python's own
    if role == "serve":
        from infra.local.http_server import new_loop

        loop = new_loop
    try:
        exit_with(lambda: run_role(role, chosen), loop)
    except typer.Exit as end:
        stays = end.exit_code in (CONFIG_ERROR, FENCED_OUT) and os.environ.get(VARIABLE)
        if stays and launched_rank(os.environ) is None:
            stay_down(role, end.exit_code)
        raise


async def run_role(role: str, chosen: SettingsFile) -> int:
    """Run `role` until SIGTERM or SIGINT. Raises ConfigError, BrokerUnavailable and the role's other errors.

    Returns 0, but for a role that a signal ended where CODE_VARIABLE names a code for that: so a supervisor can tell it
    from a role that came to its end.
    """
    settings = chosen.load()
    log_to_stderr(as_json=settings.logs.format == "json")
    failpoint.check()
    add_plugin_folders(settings.folder, settings.plugins)
    stop = asyncio.Event()
    with ExitStack() as ending:

        def begin_stop() -> None:
            if not stop.is_set():
                stop.set()
                ending.enter_context(ends_within(f"the stop of {role}", STOP_S))

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, begin_stop)
        stop_code = int(os.environ.get(CODE_VARIABLE) or 0) if launched_rank(os.environ) is None else 0
        if role == "train" and settings.trainer.ranks > 1 and launched_rank(os.environ) is None:
            code = await train_on_ranks(settings, chosen, stop)
            return code or (stop_code if stop.is_set() else 0)
        try:
            await _run(role, settings, stop)
            return stop_code if stop.is_set() else 0
        except Exception as error:
            cause = root_cause(error)
            await say_failed(role, settings, cause)
            if not isinstance(error, HeadraceError) and FINAL_WORDS.search(cause):
                raise ConfigError(cause) from error
            raise


async def say_failed(role: str, settings: Settings, reason: str) -> None:
    """Write to the log why this role ends, for `headrace status`; nothing where the log cannot be reached."""
    instance, reason = instance_name(role), reason[:MAX_REASON]
    ended = Progress(role=role, instance=instance, state="failed", life="ended", reason=reason, release=full_release())
    try:
        async with connected(settings, deadline_s=SAY_S, create=True) as log:
            await log.publish(REPORTS, ended)
    except (HeadraceError, ValueError) as error:
        logger.warning("end_not_told error=%s", error)


async def _run(role: str, settings: Settings, stop: asyncio.Event) -> None:
    metrics = Metrics(role, settings.app)
    host, wanted = metrics_address(settings)
    port = metrics.serve(wanted, host)
    logger.info("started role=%s pid=%d metrics_port=%s release=%s", role, os.getpid(), port, full_release())
    run = {"master": _master, "explore": _explore, "process": _process, "train": _train, "serve": _serve}[role]
    if not stop.is_set():
        await run(settings, metrics, stop)
    logger.info("stopped role=%s", role)


def make_role(name: str, settings: Settings, log: Log, metrics: Metrics, stop: asyncio.Event) -> Role:
    store = MeasuredStore(app_store(settings), metrics)
    return Role(floor=settings, log=log, store=store, metrics=metrics, stop=stop, instance=instance_name(name))


def metrics_address(settings: Settings) -> tuple[str, int]:
    """Address of this process's metrics: from the environment, else from the file. Raises ConfigError."""
    try:
        host, port = split_address(os.environ.get(LISTEN_VARIABLE) or settings.metrics.listen, LISTEN_VARIABLE)
        return host, port if not launched_rank(os.environ) else 0  # the first rank speaks for all
    except ValueError as error:
        raise ConfigError(str(error)) from error


def shown_host(host: str) -> str:
    """The host of an address to open, in brackets where it is IPv6."""
    host = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"[{host}]" if ":" in host else host


async def _master(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    from actors.master.master import run_master

    async with connected(settings) as log:
        await require_fit(log, app_store(settings), settings)
        await run_master(make_role("master", settings, log, metrics, stop), settings.gate())


async def open_tokenizer(settings: Settings) -> "Tokenizer":
    from infra.model.model import load_tokenizer

    policy = settings.policy
    return await asyncio.to_thread(load_tokenizer, model_folder(settings), policy.template, policy.parsers)


def open_engine(settings: Settings, use: Use, where: str) -> "Engine":
    from infra.settings.plugin import load

    options = {"model": model_folder(settings), **implied_options(settings, use), **use.options}
    engine: Engine = load(use.use, options, where)
    return engine


async def _explore(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    model_folder(settings)  # before the imports: they take seconds, and this may be a mistake
    from actors.gateway.answering.parsing import answer_parser
    from actors.rollout.explorer import run_explorer
    from infra.local.http_server import forget_loaded

    async with connected(settings) as log:  # first: a missing broker shows in seconds, a model takes longer to load
        await require_fit(log, app_store(settings), settings)
        tokenizer = await open_tokenizer(settings)
        if tokenizer.writing.chosen:
            await asyncio.to_thread(answer_parser(tokenizer).prepare)  # a mistake shows now, and not in an episode
        engine = open_engine(settings, settings.engine, "engine")
        role = make_role("explore", settings, log, metrics, stop)
        await run_explorer(role, settings.explore, engine, tokenizer, tokenizer.eos_ids, started=forget_loaded)


async def _serve(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    config = gateway_config(settings)
    model_folder(settings)
    webhooks = read_webhooks(settings)
    from actors.gateway.serve import run_gateway
    from infra.local.http_server import forget_loaded
    from infra.log.access import kafka_access
    from infra.log.kafka import KafkaBus

    await require_fit_if_there(settings)
    # Not connected here: a gateway serves while the broker is away, and connects when it is back.
    bus = KafkaBus(broker_address(settings), deadline_s=config.send_s, access=kafka_access(settings))
    log = Log(bus, settings.app, store=app_store(settings))
    tokenizer = await open_tokenizer(settings)
    await asyncio.to_thread(tokenizer.prepare)
    engine = open_engine(settings, config.engine or settings.engine, "gateway.engine")

    def listening(port: int) -> None:
        forget_loaded()
        print(f"serving http://{shown_host(split_address(config.listen)[0])}:{port}/v1", flush=True)

    try:
        role = make_role("serve", settings, log, metrics, stop)
        heard = any(source.from_.webhook == FEEDBACK_PATH for source in settings.feedback)
        await run_gateway(role, config, engine, tokenizer, webhooks=webhooks, reads_feedback=heard, listening=listening)
    finally:
        await log.bus.close()


async def _process(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    give_back_large_blocks()
    share_heaps(2)  # it decodes, saves and snapshots in threads
    search_seldom()  # groups that wait are many, and make no cycle
    from infra.log.access import kafka_access
    from streams.hosted import BrokerLogin
    from streams.worker import run_worker

    async with connected(settings) as log:
        role = make_role("process", settings, log, metrics, stop)
        await require_fit(log, role.store, settings)
        await run_worker(role, settings.streams(), BrokerLogin(broker_address(settings), kafka_access(settings)))


async def _train(settings: Settings, metrics: Metrics, stop: asyncio.Event) -> None:
    share_heaps(1)  # in another heap, gaps that publications leave between a step's blocks would grow with each version
    folder = model_folder(settings)  # before the imports: they take seconds, and this may be a mistake
    check_teacher(settings)
    from infra.model.model import context_tokens
    from trainer.batch.assemble import build_batch
    from trainer.batch.image_inputs import open_sight
    from trainer.learners.learner import Ranks
    from trainer.loop.report import TrainerReport
    from trainer.train import run_trainer

    if (launched_rank(os.environ) or 0) > 0:
        learner = await asyncio.to_thread(open_on_rank, settings, folder, os.environ)
        if not isinstance(learner, Ranks):
            raise ConfigError(several_ranks(settings))
        await asyncio.to_thread(learner.follow, app_store(settings))
        return
    # Each of its records is waited for alone, and the optimizer step with it: none would leave with others.
    async with connected(settings, linger_ms=0) as log:
        learner = await asyncio.to_thread(open_on_rank, settings, folder, os.environ)
        role = make_role("train", settings, log, metrics, stop)
        board = open_board(settings, metrics)
        try:
            await run_trainer(
                role,
                settings.trainer,
                learner,
                seed=settings.master.seed,
                report=TrainerReport(metrics, role.instance, board),
                chain=build_batch(settings.processor),
                image_inputs=await asyncio.to_thread(open_sight, folder, role.store),
                max_tokens=context_tokens(folder),
            )
        finally:
            if board is not None:
                await asyncio.to_thread(board.close)
        await asyncio.to_thread(learner.close)


def open_board(settings: Settings, metrics: Metrics) -> "Board | None":
    """TensorBoard and the trackers of the settings, None where there are none. Raises ConfigError."""
    from trainer.loop.report import Board
    from trainer.loop.trackers import open_trackers

    folder = settings.folder / settings.trainer.tensorboard if settings.trainer.tensorboard else None
    trackers = open_trackers(settings.trainer.trackers, settings.app, settings.run or settings.app, metrics)
    return Board(folder, trackers) if folder is not None or trackers else None


async def require_fit_if_there(settings: Settings) -> None:
    """`require_fit` where the broker and the store answer at once; a gateway serves without them too."""
    try:
        async with connected(settings, deadline_s=FIT_S, create=True) as log:
            await require_fit(log, app_store(settings), settings)
    except (BrokerUnavailable, StoreError) as error:
        logger.warning("log and store not compared: %s", error)


def gateway_config(settings: Settings) -> GatewayConfig:
    """The [gateway] table, or its defaults where there is none; a canary's as it runs next to the others."""
    config = settings.gateway or GatewayConfig()
    return config.as_canary() if config.channel == "canary" else config


def implied_options(settings: Settings, use: Use) -> dict[str, object]:
    """Options of an engine that other tables imply, as far as it takes them: the trainer's adapter of the model
    as `lora`, and [reload] kv as `kv`. Raises ConfigError for an engine that cannot keep keys and values and is to.
    """
    lora, kv, made = settings.trainer.lora, settings.reload.kv, find(use.use, "engine")
    takes = inspect.signature(made).parameters if callable(made) else {}
    found: dict[str, object] = {}
    if kv != (usual := ReloadConfig().kv):
        if "kv" not in takes:
            raise ConfigError(f'reload.kv: got "{kv}" with {use.use}, which has no option kv; expected "{usual}"')
        found["kv"] = kv
    if lora is not None and "lora" in takes:
        found["lora"] = {"rank": lora.rank, "alpha": lora.alpha, "targets": lora.targets}
    return found


def check_teacher(settings: Settings) -> None:
    """Raise ConfigError for a loss that needs a teacher which nothing asks, or which cannot answer."""
    from trainer.losses.loss import open_objective

    taught = [
        lane
        for lane, config in settings.trainer.lanes.items()
        if open_objective(config, f"trainer.lanes.{lane}").teacher
    ]
    if taught and settings.verify.teacher is None:
        lane = taught[0]
        raise ConfigError(
            f'trainer.lanes.{lane}.loss: "{settings.trainer.lanes[lane].loss}" needs the log-probabilities of a teacher, and '
            "nothing asks for them; expected a table [verify.teacher] with url and model"
        )
    if "usual" in taught and settings.master.temperature != 1.0:
        raise ConfigError(
            f"master.temperature: got {settings.master.temperature:g}, expected 1 with [verify.teacher]: endpoints tell "
            "log-probabilities of a prompt at temperature 1 alone"
        )


def read_webhooks(settings: Settings) -> tuple[Webhook, ...]:
    """The webhooks of the feedback sources, with their secrets. Raises ConfigError for one that is not there."""
    found = []
    for index, source in enumerate(settings.feedback):
        if not source.from_.webhook or source.from_.webhook == FEEDBACK_PATH:
            continue
        at = f"feedback[{index}].from.secret"
        secret = read_secret(at, source.from_.secret_env, source.from_.secret_file, settings.folder)
        header, stamp = source.from_.signature_header.lower(), source.from_.timestamp_header.lower()
        found.append(Webhook(source.from_.webhook, secret.encode(), header, stamp, source.from_.tenant))
    return tuple(found)


def model_folder(settings: Settings) -> str:
    """`Floor.model_path`, which must be named. Raises ConfigError."""
    if not settings.policy.model:
        raise ConfigError(f"{settings.folder}: policy.model: missing, expected a model folder or a Hugging Face name")
    return settings.model_path


async def train_on_ranks(settings: Settings, chosen: SettingsFile, stop: asyncio.Event) -> int:
    """Start the ranks and wait: this process is not one of them."""
    found = find(settings.trainer.learner.use, "trainer.learner.use")
    if not hasattr(found, "follow"):
        raise ConfigError(several_ranks(settings))
    group = RankGroup(
        argv=(sys.executable, "-m", "infra.cli.main", "train", *chosen.arguments),
        num_ranks=settings.trainer.ranks,
        log=settings.folder / "logs",
        stop_s=STOP_S,
    )
    return await run_ranks(group, stop)


def open_on_rank(settings: Settings, model: str, environment: Mapping[str, str]) -> "Learner":
    """The configured learner on a model folder. Raises ConfigError; on one of several ranks a RuntimeError is raised unchanged,
    since the settings are not at fault where another rank is gone: all start again.
    """
    from trainer.learners.learner import open_learner

    try:
        return open_learner(settings.trainer, model)
    except ConfigError as error:
        if launched_rank(environment) is not None and isinstance(error.__cause__, RuntimeError):
            raise error.__cause__ from None
        raise


def several_ranks(settings: Settings) -> str:
    return (
        f"trainer.ranks: got several with {settings.trainer.learner.use}, expected 1, or "
        'learner = { use = "trainer.learners.deepspeed:DeepSpeedLearner" }'
    )
