"""`headrace replay`: a run done again from its log, a line per checkpoint, and a verdict."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from infra.cli.options import JsonOption, command
from infra.cli.repeat.source import FromOption, ReplaySource, RunArgument, TrustOption, opened
from infra.cli.terminal import Screen, bar, print_json
from infra.ledger.archive import MAX_BYTES
from infra.log.log import runs
from infra.observe.metrics import Metrics
from infra.settings.plugin import add_plugin_folders
from infra.store.seal import FORGOTTEN
from schemas.errors import ConfigError, Sealed
from trainer.batch.image_inputs import open_sight
from trainer.journal.checkpoint import Position
from trainer.journal.origin import differences, made_with
from trainer.learners.learner import foreign_names, open_learner
from trainer.loop.report import TrainerReport
from trainer.loop.state import Learning
from trainer.replay.replay import Compared, find_start, lost_steps
from trainer.replay.replay import replay as replay_steps

SHOWN_HASH = 16


class ReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay.

    equal: Every checkpoint that was compared is. bits_promised: Nothing the bits depend on differs from the run. differs: Name
    → (in the run, here). run_s: Seconds of the run for these steps, by log-append times. forgotten: Steps that trained on data
    that was forgotten since. without_key: Steps that trained on data sealed under missing keys. The replay ends before these.
    """

    run: str
    from_step: int
    to_step: int
    steps: int
    equal: bool
    bits_promised: bool
    checkpoints: tuple[Compared, ...]
    not_compared: int
    faults: tuple[str, ...]
    differs: dict[str, tuple[str, str]]
    replay_s: float
    run_s: float
    forgotten: tuple[int, ...] = ()
    without_key: tuple[int, ...] = ()

    @property
    def verified(self) -> int:
        """Checkpoints that steps led to, and not the one it began with."""
        return sum(1 for checkpoint in self.checkpoints if checkpoint.step != self.from_step)

    @property
    def exit_code(self) -> int:
        """1 for faults, unequal promised bits, or no comparison."""
        return 1 if self.faults or not self.verified or (self.bits_promised and not self.equal) else 0


@command
async def replay(
    run: RunArgument = Path(),
    from_step: FromOption = None,
    to_step: Annotated[int | None, typer.Option("--to", help="Last step to replay.", metavar="STEP")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare; exit with 1 if weights differ, or if nothing was compared.")
    ] = False,
    trust_plugins: TrustOption = False,
    max_unpacked: Annotated[
        int, typer.Option(help="Maximum size of an unpacked archive.", metavar="BYTES", min=1, show_default="32 GiB")
    ] = MAX_BYTES,
    as_json: JsonOption = False,
) -> int:
    """Train a run again from the oldest kept checkpoint and the log, and show the weights' hash at every checkpoint.

    The command appends nothing to the log and writes nothing to the store. It names missing and altered records.
    In one process on the same CPU model, with the same code, libraries and threads, the hashes are equal; otherwise only the
    batches are, and the command lists the differences. It lists plugins and imports them only with --trust-plugins.

    Example: [cyan]headrace replay runs/demo --verify[/]
    """
    console = Screen(stderr=as_json, soft_wrap=True)
    async with opened(run, max_unpacked, trusted=trust_plugins) as source:
        check_names(console, source, trusted=trust_plugins)
        with console.status("loading the model"):
            learner = await asyncio.to_thread(open_learner, source.settings.trainer, source.model)
        learning = Learning(
            floor=source.settings,
            config=source.settings.trainer,
            learner=learner,
            report=TrainerReport(Metrics("replay")),
            position=Position(),
            image_inputs=await asyncio.to_thread(open_sight, source.model, source.store),
        )
        try:
            verdict = await done_again(console, source, learning, from_step, to_step, verify=verify)
        finally:
            learning.executor.shutdown()
    code = verdict.exit_code if verify else 0
    if as_json:
        print_json(msgspec.to_builtins(verdict) | {"verified": verdict.verified, "exit_code": code})
    else:
        summarize(console, verdict, verify=verify)
    return code


def check_names(console: Console, source: ReplaySource, *, trusted: bool) -> None:
    """Print foreign names that a replay imports, and add the plugin folders. Raises ConfigError where they are not trusted."""
    names = foreign_names(source.settings.trainer)
    if names and not trusted:
        raise ConfigError(
            f"replay would import and call what headrace does not ship: {'; '.join(names)}. --trust-plugins does so, where "
            "you know who wrote this run's settings"
        )
    for name in names:
        console.print(f"trusted: {name}", markup=False)
    if names:
        add_plugin_folders(source.settings.folder, source.settings.plugins)


async def done_again(
    console: Console, source: ReplaySource, run: Learning, from_step: int | None, to_step: int | None, *, verify: bool
) -> ReplayResult:
    """Replay under a progress bar, with a line for each checkpoint."""
    began_s = time.monotonic()
    with console.status("reading the journal"):
        start = await find_start(source.log, source.store, source.run, from_step=from_step, to_step=to_step)
        here = await run.in_thread(made_with, run.config, run.floor, run.learner)
    differs = differences(start.manifest.made_with, here)
    begin, survey = start.manifest.place.step, start.survey
    for fault in start.passed_over:
        console.print(f"passed over: {fault}", style="red", markup=False)
    for name, (there, now) in differs.items():
        console.print(f"{name}: {there} in the run, {now} here", style="yellow", markup=False)
    console.print(f"{survey.num_steps:,} steps to do after the checkpoint of step {begin}; a line for each checkpoint")
    compared: list[Compared] = []
    done: list[int] = []
    lost: dict[int, str] = {}
    with bar(console, "step", survey.num_steps) as moved:

        def on_step(step: int) -> None:
            done.append(step)
            moved(1)

        try:
            async for result in replay_steps(run, source.run, source.log, source.store, start, on_step=on_step):
                compared.append(result)
                differs = differences(result.made_with, here) | differs
                console.print(line(result, verify=verify), markup=False)
        except Sealed as error:
            console.print(f"ended before {error}", style="yellow", markup=False)
            lost = await lost_steps(source.log, source.run, start)
    return ReplayResult(
        run=source.run,
        from_step=begin,
        to_step=run.position.step,
        steps=survey.steps_in(len(done)),
        equal=all(result.equal for result in compared),
        bits_promised=not differs and here.get("device", "cpu") == "cpu",
        checkpoints=tuple(compared),
        not_compared=survey.not_compared,
        faults=(*start.passed_over, *(result.fault for result in compared if result.fault)),
        differs=differs,
        replay_s=round(time.monotonic() - began_s, 2),
        run_s=round(survey.duration_s, 2),
        forgotten=tuple(step for step, why in lost.items() if why == FORGOTTEN),
        without_key=tuple(step for step, why in lost.items() if why != FORGOTTEN),
    )


def line(compared: Compared, *, verify: bool) -> str:
    words = [f"step {compared.step:>6}  v{compared.version:<5} {compared.got[:SHOWN_HASH]}"]
    if verify:
        recorded = ", ".join(each[:SHOWN_HASH] for each in compared.expected)
        words.append("equal" if compared.equal else f"DIFFERS: the run recorded {recorded}")
        if not compared.equal and compared.distance is not None:
            words.append(f"largest difference of a weight {compared.distance:.3g}")
        if compared.fault:
            words.append(compared.fault)
    return "  ".join(words)


def summarize(console: Console, verdict: ReplayResult, *, verify: bool) -> None:
    rate = verdict.steps / verdict.replay_s if verdict.replay_s else 0.0
    ratio = f", {verdict.run_s / verdict.replay_s:.1f} times faster than the run" if verdict.replay_s else ""
    console.print(
        f"{verdict.steps} steps from step {verdict.from_step} to {verdict.to_step} in {verdict.replay_s:.1f} s: "
        f"{rate:.1f} steps/s{ratio} ({verdict.run_s:.1f} s by its log)"
    )
    sealed = "their texts are sealed, and the keys are not here. No archive has keys: replay the run where its store is"
    for steps, why in (
        (verdict.forgotten, "cannot be reproduced: their texts were forgotten"),
        (verdict.without_key, f"cannot be replayed here: {sealed}"),
    ):
        if steps:
            console.print(f"steps {listed(steps)} {why}", style="yellow")
    if lost := (*verdict.forgotten, *verdict.without_key):
        console.print(f"what follows a checkpoint of step {max(lost)} or later can be: --from", style="yellow")
    if verify:
        summarize_checkpoints(console, verdict)


def summarize_checkpoints(console: Console, verdict: ReplayResult) -> None:
    """Print the sentence about all checkpoints, and whether their bits are promised."""
    num, wrong = len(verdict.checkpoints), [each.step for each in verdict.checkpoints if not each.equal]
    if verdict.not_compared:
        console.print(f"{verdict.not_compared} checkpoints of steps that were rolled back later are not compared")
    if wrong:
        right = [each.step for each in verdict.checkpoints if each.step < wrong[0]]
        since = f"; equal up to step {right[-1]}, so it is in the steps after that" if right else ""
        said = f"{len(wrong)} of {num} checkpoints differ, the first at step {wrong[0]}{since}", "red"
    elif not verdict.verified:
        why = "" if verdict.faults else ": no step led to a checkpoint that could be compared"
        said = f"nothing is verified{why}", "red"
    elif verdict.forgotten or verdict.without_key:
        said = f"{num} checkpoints up to step {verdict.checkpoints[-1].step} equal; none after it is verified", ""
    elif verdict.faults:
        said = f"{num} checkpoints equal, {len(verdict.faults)} damaged in the store: so it exits with 1", "red"
    else:
        said = f"all {num} checkpoints equal", "green"
    console.print(said[0], style=said[1])
    if not verdict.bits_promised:
        why = f"differs from the run: {', '.join(verdict.differs)}" if verdict.differs else "not computed on the CPU"
        console.print(f"bits are not promised here ({why}); every batch is the journaled batch", style="yellow")


def listed(steps: Sequence[int]) -> str:
    """Steps in ascending order, consecutive steps as a range.

    >>> listed((0, 1, 2, 3, 7, 9))
    '0 to 3, 7, 9'
    """
    found = [(first, stop - 1) for first, stop in runs(steps, max_hole=1)]
    return ", ".join(f"{first} to {last}" if first < last else str(first) for first, last in found)
