"""`headrace eval SUITE`: asks the master for a suite's answers by exactly one version, and waits for the result.

    Directive(eval) in policies ─> master: eval tasks ─> explorers ─> verify ─> EvalResult in evals

The request is a record in the log: it outlives this command and the master alike.
"""

import asyncio
from collections.abc import Iterable
from typing import Annotated

import typer

from actors.config import EvalSuite
from infra.cli.connect import connected
from infra.cli.look.audit import operator
from infra.cli.look.status import accuracy_text
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, print_json
from infra.log.log import Log
from infra.policies.beginning import folded
from infra.settings.config import duration_s
from schemas import Directive, EvalResult
from schemas.errors import ConfigError
from schemas.topics import EVALS, POLICIES


@command
async def evaluate(
    chosen: SettingsFile,
    suite: Annotated[str, typer.Argument(help="Suite of [[master.evals]].")],
    version: Annotated[
        int | None, typer.Option(min=0, help="Policy version, the newest or a future version. Default: the newest.")
    ] = None,
    within: Annotated[str, typer.Option(help="Maximum wait for the result.")] = "10m",
    as_json: JsonOption = False,
) -> int:
    """Evaluate exactly one version on a suite, in addition to the schedule, and print the result.

    The request is in the log, so it outlives this command. An engine cannot load an older version: the command refuses it,
    and if explorers pass the version meanwhile, a later version answers.

    Example: [cyan]headrace eval held-out --version 144[/]
    """
    settings = chosen.load()
    timeout_s = duration_s(within)
    check_suite(suite, settings.master.evals)
    async with connected(settings) as log:
        wanted = await request(log, settings.policy.name, suite, version)
        status = Screen(stderr=True)
        try:
            with status.status(f"{suite} by version {wanted}"):
                async with asyncio.timeout(timeout_s):
                    found = await wait_for_result(log, settings.policy.name, suite, wanted)
        except TimeoutError:
            status.print(
                f"no result of {suite} at version {wanted} within {within}: the request stays in the log; "
                "`headrace status` shows whether master and explorers are at work",
                style="red",
            )
            return 1
    if as_json:
        print_json(found)
    else:
        stats = {"share": found.accuracy, "interval": found.interval, "pass_at": found.pass_at}
        asked = "" if found.version == wanted else f" (explorers were past version {wanted})"
        Screen().print(f"{suite} {accuracy_text(stats)} at v{found.version}{asked}")
    return 0


def check_suite(suite: str, known: Iterable[EvalSuite]) -> None:
    """Raises ConfigError for a suite the master does not know."""
    names = [entry.suite for entry in known]
    if suite not in names:
        raise ConfigError(
            f"suite: got {suite!r}, expected one of [[master.evals]]: {', '.join(names) or 'there are none'}"
        )


async def request(log: Log, policy: str, suite: str, version: int | None) -> int:
    """Ask for a suite at a version, by default the newest; returns the version. Raises ConfigError for one that passed.

    An engine cannot go back, so what explorers left behind could only be missed. What is in the log already is not asked
    for again.
    """
    newest = max((await folded(log)).of(policy).published, default=0)
    wanted = newest if version is None else version
    done = [message.value async for message in log.read_all(EVALS)]
    if any(isinstance(record, EvalResult) and is_answer(record, policy, suite, wanted) for record in done):
        return wanted
    if wanted < newest:
        raise ConfigError(
            f"--version: got {wanted}, expected {newest} or more: explorers hold version {newest} and cannot go back"
        )
    await log.publish(POLICIES, Directive(order="eval", owner=operator(), suite=suite, version=wanted))
    return wanted


async def wait_for_result(log: Log, policy: str, suite: str, version: int) -> EvalResult:
    """The result for this version, or for the later one the master asked for when explorers had passed it."""
    async for message in log.read_all(EVALS):
        if isinstance(message.value, EvalResult) and is_answer(message.value, policy, suite, version):
            return message.value
    async for message in log.read_all(EVALS, until_end=False):
        value = message.value
        if (
            isinstance(value, EvalResult)
            and value.policy == policy
            and value.suite == suite
            and value.version >= version
        ):
            return value
    raise AssertionError("a reader that never ends has ended")


def is_answer(result: EvalResult, policy: str, suite: str, version: int) -> bool:
    return (result.policy, result.suite, result.version) == (policy, suite, version)
