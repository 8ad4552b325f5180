"""`headrace plan`: what rates need, by what was measured.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from infra.cli.options import DEFAULT, ConfigOption, JsonOption, SetOption, exit_with, with_flags


class RateFlags(msgspec.Struct, frozen=True):
    """What comes in, and what one engine and the trainer do."""

    groups_per_s: Annotated[float, typer.Option(min=0, help="Groups that explorers sample a second.")] = 0.0
    requests_per_s: Annotated[float, typer.Option(min=0, help="Requests that gateways answer a second.")] = 0.0
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, with what was said before.")] = 1000
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 500
    rated: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that get feedback.")] = 0.2
    engine_tokens_per_s: Annotated[
        float, typer.Option(min=0, help="That one engine samples; an explorer reports it as tokens_per_s.")
    ] = 0.0
    learner_tokens_per_s: Annotated[
        float, typer.Option(min=0, help="Sampled ones that the trainer trains on; bench learner measures it.")
    ] = 0.0
    measured: Annotated[
        Path | None,
        typer.Option(help="Folder with what other benchmarks printed, as hop.json.", show_default="what is shipped"),
    ] = None


@with_flags
def plan(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    *,
    flags: RateFlags,
    as_json: JsonOption = False,
) -> None:
    """What rates need: bytes and disk by topic, stream workers, gateways, explorers, partitions, and what is full first.

    Computed from measured unit costs, which are printed with it. Group size, partitions, copies, retention and processes are
    those of the settings. Scores and processors of your own come on top. Exit code 1: what the settings name will not keep up.

    Example: [cyan]headrace plan --groups-per-s 2 --requests-per-s 50 --engine-tokens-per-s 4000[/]
    """
    import json

    from infra.cli.plan.plan import Rates
    from infra.cli.plan.plan import run as planned
    from infra.cli.plan.table import shown
    from infra.cli.settings import load_settings
    from infra.cli.terminal import Screen

    def body() -> int:
        settings = load_settings(config, sets)
        size = settings.master.num_episodes
        rates = Rates(
            groups=flags.groups_per_s, requests=flags.requests_per_s, size=size, prompt=flags.prompt,
            answer=flags.answer, rated=flags.rated,
        )  # fmt: skip
        engine, learner = flags.engine_tokens_per_s, flags.learner_tokens_per_s
        found = planned(settings, rates, engine=engine, learner=learner, measured=flags.measured)
        if as_json:
            more = {"computed": True, "each_broker": found.each_broker, "problems": found.problems}
            print(json.dumps(msgspec.to_builtins(found) | more))
        else:
            for piece in shown(found):
                Screen(width=130).print(piece)
        return 1 if found.problems else 0

    exit_with(body)
