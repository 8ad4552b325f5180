"""The commands that decide what customers are served and whether it learns: channel, promote, pin, …, pause, resume.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from infra.cli.options import DEFAULT, ConfigOption, JsonOption, SetOption, exit_with

Version = Annotated[int, typer.Argument(min=0, help="A published policy version.")]
Why = Annotated[str, typer.Option("--why", help="Kept with the decision.")]


def channel(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    every: Annotated[bool, typer.Option("--all", help="Every decision of the app's life.")] = False,
) -> None:
    """Show the version customers are served, and the newest decisions about it with their numbers.

    The gate ([bold]\\[master.gate][/]) promotes what its eval suites let pass; the commands below move it by hand.
    """
    from infra.cli.govern.channel import run_channel

    exit_with(lambda: run_channel(config, sets, as_json=as_json, every=every))


def promote(
    version: Version,
    why: Why = "",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    canary: Annotated[bool, typer.Option("--canary", help="To the share of sessions that a canary answers.")] = False,
) -> None:
    """Serve a version to customers from here on; while a version is pinned it waits for the pin's end.

    With [bold]--canary[/] a share of them tries it ([bold]\\[gateway.canary][/]) until it is promoted, held by the gate, or
    the stable version moves.

    Example: [cyan]headrace promote 144 --why "looked at fifty answers"[/]
    """
    from infra.cli.govern.channel import run_move

    channel: Literal["canary", "stable"] = "canary" if canary else "stable"
    exit_with(lambda: run_move("promoted", version, why, config, sets, channel=channel))


def pin(version: Version, why: Why = "", config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Hold customers at a version, whatever the gate promotes, until `headrace unpin`.

    Example: [cyan]headrace pin 120 --why "launch week"[/]
    """
    from infra.cli.govern.channel import run_move

    exit_with(lambda: run_move("pinned", version, why, config, sets))


def unpin(why: Why = "", config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """End a pin: customers go to the newest promoted version."""
    from infra.cli.govern.channel import run_move

    exit_with(lambda: run_move("pinned", -1, why, config, sets))


def rollback(version: Version, why: Why = "", config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Take customers back to an older version. Training continues, and what it publishes has to pass the gate again.

    Example: [cyan]headrace rollback 120 --why "refuses too often"[/]
    """
    from infra.cli.govern.channel import run_move

    exit_with(lambda: run_move("rolled_back", version, why, config, sets))


def pause(why: Why = "", config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Stop learning while serving continues: no new groups, no optimizer step, no new version, until [bold]resume[/].

    Answers are still recorded and rated; what they teach waits in the buffer. It outlives restarts.

    Example: [cyan]headrace pause --why "feedback source looks wrong"[/]
    """
    from infra.cli.govern.channel import run_learning

    exit_with(lambda: run_learning("pause", why, config, sets))


def resume(why: Why = "", config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Let learning go on after a [bold]pause[/] or a drain: what has waited is trained on first."""
    from infra.cli.govern.channel import run_learning

    exit_with(lambda: run_learning("continue", why, config, sets))


def export_model(
    version: Annotated[str, typer.Argument(help='A published version, "newest" or "stable".')],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not be there, or be empty.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone; for a run with [trainer.lora].")
    ] = False,
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Write a version as a model folder: configuration, tokenizer, safetensors. transformers and vLLM load it as any other.

    A version of a run with [trainer.lora] is merged into policy.model; --adapter writes the folder that peft writes instead.
    Every tensor is verified first. headrace.json next to the weights says which version it is, and what the gate and people
    decided about it.

    Example: [cyan]headrace export-model stable ./support-v144[/]
    """
    from infra.cli.govern.export_model import run_export_model

    exit_with(lambda: run_export_model(version, folder, config, sets, adapter))
