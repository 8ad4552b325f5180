"""The demo's screen: what each role does, how well the model does, what happens to experiences. Drawn from a Watch alone."""

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.cli.demo.report import DemoReport
from infra.cli.demo.settings import DemoOptions
from infra.cli.demo.watch import Watch
from infra.cli.settings import Settings

DUTIES = {
    "kafka": "the log: everything that happened, in order",
    "master": "issues tasks as fast as learning can take them",
    "explore": "samples answers with {engine}, hot-reloads policies",
    "process": "verifies, scores and collects with Faust",
    "train": "journals, trains, publishes",
    "serve": "the gateway: answers users, follows what the gate lets pass",
    "users": "ask, rate (some late), correct, withdraw",
}
TELL_S = 5.0
BARS = " ▁▂▃▄▅▆▇█"
ROLLOUTS_ALONE = {"staleness", "engine against trainer", "sampling"}


class DemoScreen:
    """Redraws four times a second on a terminal. Without one, prints a line of progress every `tell_s`.

    It must be entered in a running event loop.
    """

    def __init__(
        self, console: Console, watch: Watch, settings: Settings, options: DemoOptions, *, tell_s: float = TELL_S
    ) -> None:
        self._tell_s = tell_s
        self._console = console
        self._watch = watch
        self._settings = settings
        self._options = options
        self._telling: asyncio.Task[None] | None = None
        self._live = Live(console=console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        else:
            self._console.print(f"headrace demo in {self._settings.folder}; logs in {self._settings.folder / 'logs'}")
            self._telling = asyncio.create_task(self.tell())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live.is_started:
            self._live.stop()
        if self._telling is not None:
            self._telling.cancel()

    async def tell(self) -> None:
        """Print a line of progress every `tell_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._tell_s)
            self._console.print(progress_line(self._watch), soft_wrap=True)

    def print_result(self, report: DemoReport) -> None:
        """Print the table at the end, and the commands to try next."""
        self._console.print(result_table(report))
        folder = self._settings.folder
        self._console.print(f"plot    {folder / 'report.png'}\nreport  {folder / 'report.json'}\n")
        config = self._settings.folder / "headrace.toml"
        with contextlib.suppress(ValueError):  # shorter where it lies below the current folder
            config = config.relative_to(config.cwd())
        self._console.print("Worth trying next:")
        for command in ("peek buffer -n 3", "peek batches -n 3", "up", "console"):
            where = f" -c {config}"
            self._console.print(f"  headrace {command}{where}", style="bold")
        self._console.print("The last shows all of it in the browser: every answer, every version and why.")

    def _draw(self) -> RenderableType:
        watch = self._watch
        title = Text.assemble(
            (f"headrace demo: {self._options.task}  ", "bold"), (f"{watch.elapsed_s():5.0f} s  ", "cyan"),
            (watch.phase, "italic"),
            (f"   control: {self._options.control}" if self._options.control != "none" else "", "yellow"),
        )  # fmt: skip
        return Group(
            title, roles_table(watch, self._options.engine), Panel(learning(watch), title="learning"), flows(watch)
        )


def roles_table(watch: Watch, engine: str) -> Table:
    """One line per process."""
    table = Table(box=None, pad_edge=False)
    for column in ("role", "state", "memory", "restarts", "what it does"):
        table.add_column(column, style="dim" if column == "what it does" else None)
    for states in watch.children:
        for name, state in states.items():
            if name not in DUTIES:
                continue
            report = watch.newest.get(name)
            word = (report.state if report else "") or ("running" if state.pid else "starting")
            if state.pid is None:
                word = "down"
            memory = f"{state.rss_bytes / 2**20:,.0f} MB"
            table.add_row(name, word, memory, str(state.restarts or ""), DUTIES[name].format(engine=engine))
    return table


def version_name(version: int) -> str:
    """A version as people read it.

    >>> version_name(8), version_name(-1)
    ('v8', 'no version yet')
    """
    return f"v{version}" if version >= 0 else "no version yet"


def progress_line(watch: Watch) -> str:
    """How far a run is, in one line."""
    suites = ", ".join(
        f"{suite} {found[max(found)]:.1%} at v{max(found)}" for suite, found in sorted(watch.accuracy.items())
    )
    newest = version_name(max(watch.published, default=-1))
    return (
        f"{watch.elapsed_s():5.0f} s  {watch.phase}: {watch.counter('train', 'steps'):,.0f} steps, "
        f"{watch.counter('train', 'experiences_trained'):,.0f} experiences trained, {newest}"
        + (f"; {suites}" if suites else "")
    )


def learning(watch: Watch) -> RenderableType:
    """Accuracy by version, and the numbers of the moment."""
    lines = []
    for suite, found in sorted(watch.accuracy.items(), reverse=True):
        values = [found[version] for version in sorted(found)]
        newest = max(found)
        bar = "".join(BARS[min(8, int(value * 8.999))] for value in values[-60:])
        lines.append(
            Text.assemble((f"{suite:<9}", "bold"), (f" {found[newest]:6.1%} at v{newest:<5}", "green"), (bar, "green"))
        )
    if not lines:
        lines.append(Text("no evaluation yet: the engine is loading while the trainer warms up", style="dim"))
    served = watch.newest["explore"].version if "explore" in watch.newest else -1
    lines.append(
        Text(
            f"policy   published {version_name(max(watch.published, default=-1))}, served {version_name(served)}   "
            f"steps {watch.counter('train', 'steps'):,.0f}   reward {number(watch.gauge('train', 'reward_mean'))}   "
            f"staleness {number(watch.gauge('train', 'usual/staleness_mean'))} mean, "
            f"{number(watch.gauge('train', 'usual/staleness_max'), 0)} max   "
            f"validation {number(watch.gauge('train', 'validation_accuracy'))}"
        )
    )
    return Group(*lines)


def flows(watch: Watch) -> RenderableType:
    """Rates and drops."""
    drops = ", ".join(f"{reason} {count:,.0f}" for reason, count in sorted(watch.drops().items())) or "none"
    rate = number(watch.gauge("explore", "tokens_per_s"), 0)
    return Text(
        f"sampled {watch.counter('explore', 'tokens'):,.0f} tokens ({rate}/s)   "
        f"trained {watch.counter('train', 'experiences_trained'):,.0f} experiences\ndropped  {drops}",
        style="dim",
    )


def result_table(report: DemoReport) -> Table:
    """The figures of the report, as a table."""
    table = Table(title="headrace demo", show_header=False)
    values = report.values
    rows = {
        values["measure"]: " → ".join(
            percent(values[name]) for name in ("accuracy_start", "accuracy_after_sft", "accuracy_final")
        )
        + "  (start, after the warm-up, final)",
        "wall time": f"{values['wall_s']:.0f} s, first experience after {number(values['startup_s'], 0)} s",
        "optimizer steps": f"{values['steps']} and {values['warmup_steps']} of warm-up, {values['policy_versions']} versions",
        "experiences": f"{values['experiences_published']:,} published, {values['experiences_trained']:,} trained, "
        f"{sum(values['dropped'].values()):,} dropped, {values['pending']:,} pending",
        "dropped": ", ".join(f"{reason} {count:,}" for reason, count in values["dropped"].items()) or "none",
        "staleness": f"{number(values['staleness_mean'])} mean, {values['staleness_p95']} p95, {values['staleness_max']} max",
        "engine against trainer": f"{number(values['mismatch_abs_max'], 7)} largest logprob difference",
        "hot reload": f"pause {number(values['reload_pause_ms_p50'], 0)} ms p50, "
        f"{number(values['reload_pause_ms_p95'], 0)} p95 with {values['reload_kv']}, "
        f"published to serving {number(values['publish_to_serving_ms_p95'], 0)} ms p95",
        "requests failed": str(values["requests_failed"]),
        "sampling": f"{number(values['rollout_tokens_per_s'], 0)} tokens/s; idle: explorer "
        f"{number(values['explorer_idle_share'])}, trainer {number(values['trainer_idle_share'])}",
        "peak memory": ", ".join(f"{name} {value:,.0f}" for name, value in values["peak_rss_mb"].items()) + " MB",
    }
    if "stable" in values:
        rows = traffic_rows(values) | {name: text for name, text in rows.items() if name not in ROLLOUTS_ALONE}
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def traffic_rows(values: Mapping[str, Any]) -> dict[str, str]:
    """The rows of the traffic demo, which come first."""
    right = " → ".join(percent(values[name]) for name in ("users_right_first", "users_right_last"))
    stable = " → ".join(percent(values[name]) for name in ("stable_first", "stable_last"))
    habits = ", ".join(f"{count:,} {habit}" for habit, count in values["habits"].items())
    return {
        "stable channel": f"{stable} of the held-out tasks; {len(values['stable'])} versions let pass, {values['held']} held",
        "what users saw": f"{right} right, of {values['answers']:,} answers",
        "what they said": habits,
        "staleness": f"{number(values['live_staleness_mean'], 0)} versions on average, which the lane does not bound",
    }


def percent(share: float | None) -> str:
    """A share in percent; a dash for none."""
    return "–" if share is None else f"{share:.1%}"


def number(value: float | None, digits: int = 2) -> str:
    """A number; a dash for none."""
    return "–" if value is None else f"{value:,.{digits}f}"
