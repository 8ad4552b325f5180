"""`headrace check`: are the settings sound, do the plugins load, what runs in which order, is the broker as expected."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from infra.chain import Step
from infra.cli.connect import connected
from infra.cli.settings import Settings, load_settings
from infra.config import duration_s
from infra.plugin import add_plugin_folders, find


async def run_check(config: Path, sets: list[str], create: bool) -> int:
    """Print what was resolved; raises ConfigError for what cannot hold."""
    from streams.chain_builder import build_collect, build_verify

    settings = load_settings(config, sets)
    add_plugin_folders(settings.folder, settings.plugins)
    streams = settings.streams()
    console = Console(highlight=False)
    console.print(summary(settings))
    for stage, steps in (("verify", build_verify(streams)), ("collect", build_collect(streams))):
        console.print(chain_table(stage, steps))
    for index, feedback in enumerate(settings.feedback):
        find(feedback.use, f"feedback[{index}].use")
    find(settings.engine.use, "engine.use")
    find(settings.trainer.learner.use, "trainer.learner.use")
    if create:
        async with connected(settings, deadline_s=15.0) as log:
            keep_ms = int(duration_s(settings.keep.replay) * 1000)
            created = await log.create_topics(partitions=settings.kafka.partitions, keep_ms=keep_ms)
        console.print(f"topics created: {', '.join(created) or 'none, all were there'}")
    return 0


def summary(settings: Settings) -> Table:
    """The decisions that matter most, as resolved."""
    pacing = settings.pacing
    table = Table(title=settings.app, show_header=False)
    lanes = ", ".join(f"{lane}: {one.loss} × {one.weight:g}" for lane, one in settings.trainer.lanes.items())
    rows = {
        "broker": settings.kafka.bootstrap_servers or "embedded",
        "store": settings.store.url,
        "keep": settings.keep.replay,
        "policy": f"{settings.policy.name}, from {settings.policy.model or 'nothing yet'}",
        "engine": settings.engine.use,
        "learner": settings.trainer.learner.use,
        "pacing": f"{pacing.groups_per_step} groups per step, {pacing.steps_per_version} steps per version, "
        f"at most {pacing.max_staleness} versions stale",
        "lanes": lanes,
        "reward": settings.reward.use or str(settings.reward.blend or "every score alike"),
        "feedback": ", ".join(one.name for one in settings.feedback) or "none",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def chain_table(stage: str, steps: tuple[Step, ...]) -> Table:
    """The steps of a stage in the order they run."""
    table = Table("step", "version", "sees", "options", title=stage, title_justify="left")
    for step in steps:
        options = ", ".join(f"{name}={value!r}" for name, value in step.options.items())
        table.add_row(
            step.name, str(step.version), f"an {step.kind}" if step.kind == "experience" else f"a {step.kind}", options
        )
    return table
