"""`headrace check`: tests the settings and the plugins, and shows the steps of each stage in their order."""

import importlib.util
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from infra.chain.chain import Step
from infra.chain.processor import declared_mark
from infra.cli.check.connect import try_connections
from infra.cli.connect import create_source_topics, create_topics, reading
from infra.cli.options import SettingsFile, command
from infra.cli.plan.model import configured_adapter
from infra.cli.run.roles import check_teacher, implied_options, read_webhooks
from infra.cli.settings import Settings
from infra.cli.terminal import Screen, two_columns
from infra.log.access import kafka_access
from infra.settings.config import Use
from infra.settings.plugin import add_plugin_folders, check_names, find, option_defaults
from schemas.errors import ConfigError
from streams.config import FeedbackConfig
from streams.sources.event import EventSource
from streams.sources.langfuse import read_keys


@command
async def check(
    chosen: SettingsFile,
    create: Annotated[
        bool, typer.Option("--create", help="Create missing topics of the app and of feedback sources.")
    ] = False,
    connect: Annotated[
        bool, typer.Option("--connect", help="Test broker, topics, groups and store instead, and list missing rights.")
    ] = False,
    role: Annotated[
        str, typer.Option(help="Role whose rights --connect tests: master, train, process, explore, serve, operator.")
    ] = "operator",
) -> int:
    """Check the settings and plugins, and show the resolved chain of each stage.

    The command refuses what a role would refuse at its start: unknown keys, plugins that do not load, wrong options, a missing
    model or secret. It reads no weights and, without --connect, asks no broker.

    --connect tests everything that the roles use, from this machine and as the user of these settings: the broker, reading
    and writing each topic, each group, and put, list, get and delete in the store. It leaves nothing behind. --role tests only
    the rights of that role. Exit code 1: a right or a topic is missing.

    Example: [cyan]headrace check --create[/] also creates the topics that are missing.
    """
    return await try_connections(chosen.load(), role) if connect else await check_settings(chosen.load(), create=create)


async def check_settings(settings: Settings, *, create: bool) -> int:
    """Print the resolved settings and chains. Raises ConfigError for wrong settings."""
    from streams.sources.source import build_sources
    from streams.stages.chain_builder import build_collect, build_tasks, build_verify
    from trainer.batch.assemble import build_batch

    add_plugin_folders(settings.folder, settings.plugins)
    streams = settings.streams()
    collect = build_collect(streams, settings.model_path)
    chains = {"tasks": build_tasks(streams), "verify": build_verify(streams, settings.model_path), "collect": collect}
    if batch := build_batch(settings.processor):
        chains["batch"] = batch
    sources = build_sources(settings.feedback, settings.folder)
    notes = check_plugins(settings) + check_reward(settings)
    if settings.gateway is not None and settings.gateway.train_on == "nothing":
        notes.append('gateway.train_on is "nothing": answers are served, and neither recorded nor learned from')
    parsers = ""
    if create:
        notes.append(
            "model and secrets are not looked at: topics may be made where no role runs; check without --create does"
        )
    else:
        check_secrets(settings, sources)
        parsers, missing = check_model(settings)
        notes += missing
    console = Screen()
    console.print(summary(settings, parsers))
    for stage, steps in chains.items():
        console.print(chain_table(stage, steps))
    if sources:
        versions = {source.name: declared_mark(source.function).version for source in sources}
        console.print(feedback_table(settings.feedback, versions))
    for note in notes:
        console.print(f"note: {note}", style="yellow")
    if create:
        async with reading(settings, create=True) as log:
            created = [*await create_topics(log, settings), *await create_source_topics(log, settings)]
        console.print(f"topics created: {', '.join(created) or 'none, all were there'}")
    return 0


def check_plugins(settings: Settings) -> list[str]:
    """Find the plugins outside the streams; returns notes on parts that this machine cannot check. Raises ConfigError."""
    from actors.rollout.workflow import Workflows

    Workflows(settings.explore.workflow, settings.explore.options, settings.explore.workflows)
    if importlib.util.find_spec("torch") is None:
        return ["engine, learner and losses are not checked: they need torch, which is not installed here"]
    from trainer.learners.critic import check_critic
    from trainer.loop.trackers import check_trackers
    from trainer.losses.loss import open_objectives

    notes = check_engine(settings, settings.engine, "engine.use")
    if settings.gateway is not None and settings.gateway.engine is not None:
        notes += check_engine(settings, settings.gateway.engine, "gateway.engine.use")
    find(settings.trainer.learner.use, "trainer.learner.use")
    check_teacher(settings)
    check_trackers(settings.trainer.trackers)
    objectives = open_objectives(settings.trainer.lanes)
    retrains = [index for index, source in enumerate(settings.feedback) if source.late == "retrain"]
    if retrains and "human" in objectives and objectives["human"].mean == "pairs":
        raise ConfigError(
            f'feedback[{retrains[0]}].late: got "retrain", which sends answers to lane human, but its loss '
            f'"{settings.trainer.lanes["human"].loss}" takes pairs alone; expected late = "amend", or another loss in '
            "[trainer.lanes.human]"
        )
    check_critic(settings.trainer, objectives)
    if settings.trainer.lora is not None and Path(settings.model_path, "config.json").is_file():
        configured_adapter(settings)
    return notes


def check_reward(settings: Settings) -> list[str]:
    """Names in [reward] that no score or feedback source of the file gives; a workflow may still give them."""
    given = {score.name for score in settings.score} | {source.name for source in settings.feedback}
    named = {"blend": settings.reward.blend, "require": settings.reward.require}
    known = f"{', '.join(sorted(given))}, or one" if given else "a name"
    return [
        f'reward.{key}: no [[score]] or [[feedback]] is called "{name}"; expected {known} that a workflow returns'
        for key, names in named.items()
        for name in names
        if name not in given
    ]


def summary(settings: Settings, parsers: str = "") -> Table:
    """The decisions that matter most, as resolved. parsers: how the model writes calls and thoughts."""
    pacing, lora = settings.pacing, settings.trainer.lora
    adapter = (
        "" if lora is None else f", an adapter of rank {lora.rank}, alpha {lora.alpha}, on {', '.join(lora.targets)}"
    )
    groups = (
        f"{settings.groups_awaited} {'groups' if 'usual' in settings.trainer.lanes else 'answers or more'} per step"
    )
    lanes = ", ".join(f"{lane}: {config.loss} × {config.weight:g}" for lane, config in settings.trainer.lanes.items())
    rows = {
        "broker": settings.kafka.bootstrap_servers or "embedded",
        "store": settings.store.shown,
        "keep": f"{settings.keep.replay}, of new topics; existing topics keep theirs",
        "policy": f"{settings.policy.name}, from {settings.policy.model or 'nothing yet'}",
        **({"answers": parsers} if parsers else {}),
        "engine": settings.engine.use
        + (", which keeps keys and values over a reload" if settings.reload.kv == "keep" else ""),
        "learner": settings.trainer.learner.use + adapter,
        "pacing": f"{groups}, {pacing.steps_per_version} steps per version, "
        f"at most {pacing.max_staleness} versions stale",
        "lanes": lanes,
        "reward": settings.reward.use or shown(settings.reward.blend) or "every score alike",
    }
    return two_columns(settings.app, rows.items(), numbers=False)


def chain_table(stage: str, steps: Sequence[Step]) -> Table:
    table = Table("step", "version", "sees", "options", title=f"stage {stage}", title_justify="left")
    sees = {
        "task": "a task",
        "experience": "an experience",
        "group": "a group",
        "batch": "the whole batch",
        "score": "an experience, gives a score",
    }
    for step in steps:
        options = shown(option_defaults(step.function))
        if step.memory:
            options = f"{options}, memory={step.memory}" if options else f"memory={step.memory}"
        table.add_row(step.name, str(step.version), sees[step.kind], options)
    return table


def feedback_table(configs: Sequence[FeedbackConfig], versions: dict[str, int]) -> Table:
    columns = ("source", "version", "function", "listens to", "window", "default", "late")
    table = Table(title="feedback", title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for source in configs:
        listens = source.from_
        named = (("topic", listens.topic), ("file", listens.file), ("webhook", listens.webhook))
        place = next((f"{kind} {name}" for kind, name in named if name), "langfuse")
        table.add_row(
            source.name, str(versions[source.name]), source.use, place, source.window, str(source.default), source.late
        )
    return table


def shown(options: dict[str, object] | dict[str, float]) -> str:
    """Options as one line.

    >>> shown({"min_tokens": 8})
    'min_tokens=8'
    """
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def check_model(settings: Settings) -> tuple[str, list[str]]:
    """Parsers of calls and thoughts, "" if the model was not opened, and notes. Raises
    ConfigError for a model that is not there, and for parsers that are not.
    """
    path = settings.model_path
    if not path:
        return "", ["policy.model: missing: explore, serve and train do not start without"]
    if importlib.util.find_spec("transformers") is None:
        return "", ["policy.model is not opened: that needs transformers, which is not installed here"]
    from actors.gateway.answering.parsing import answer_parser
    from infra.model.model import context_tokens, load_tokenizer

    try:
        context_tokens(path)
        tokenizer = load_tokenizer(path, settings.policy.template, settings.policy.parsers)
    except ConfigError as error:
        raise ConfigError(f'policy.model: got "{settings.policy.model}": {error}') from error
    parser = answer_parser(tokenizer)
    if tokenizer.writing.chosen:
        parser.prepare()
    why = "by [policy]" if tokenizer.writing.chosen else "by the chat template"
    return f"{tokenizer.writing.shown}, {why}", [f"policy: {parser.refusal}"] if parser.refusal else []


def check_secrets(settings: Settings, sources: Sequence[EventSource]) -> None:
    """Read every secret of the broker and of feedback sources. Raises ConfigError."""
    if settings.kafka.bootstrap_servers:
        kafka_access(settings)
    if settings.gateway is not None:
        read_webhooks(settings)
    for source in sources:
        if source.langfuse is not None:
            read_keys(source)


def check_engine(settings: Settings, use: Use, where: str) -> list[str]:
    """Find an engine and compare its options with its parameters; returns notes on unchecked options. Raises ConfigError."""
    found = find(use.use, where)
    implied = implied_options(settings, use)
    takes = inspect.signature(found).parameters if callable(found) else {}
    options = {**implied, **use.options}
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
        check_names(options, takes, where.removesuffix(".use"))
        return []
    check = getattr(found, "check_options", None)
    rest = {name: value for name, value in use.options.items() if name not in takes}
    if check is None or not rest or check(rest):
        return []
    return [f"{where.removesuffix('.use')}.options: {', '.join(sorted(rest))} not checked: vLLM is not installed here"]
