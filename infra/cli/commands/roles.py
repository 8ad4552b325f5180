"""One verb per role.

Bodies import what they need when they run: see `infra.cli.main`.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.exit_codes import CONFIG_ERROR, FENCED_OUT
from infra.cli.options import DEFAULT, ConfigOption, SetOption, exit_with
from infra.cli.run.stay_down import VARIABLE, stay_down


def master(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Issue tasks as the staleness budget allows, issue unfinished ones again, request evals.

    One is enough. It keeps no state of its own: everything is counted again from the log when it starts.
    """
    _role("master", config, sets)


def explore(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Run tasks on an engine, publish experiences, follow new policies while generating.

    Any number of them share the tasks. A new policy is loaded between two tokens; no request is dropped for it.

    Example: [cyan]headrace explore --set engine.use=actors.engines.torch:TorchEngine[/]
    """
    _role("explore", config, sets)


def process(config: ConfigOption = DEFAULT, sets: SetOption = []) -> None:  # noqa: B006
    """Run the stream processors: tasks, verify, collect and the feedback sources.

    Any number of them share the partitions; killed or rebalanced, they decide as one that was never disturbed.
    """
    _role("process", config, sets)


def train(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    ranks: Annotated[int, typer.Option(help="Processes that train together; 0 takes \\[trainer] ranks.")] = 0,
) -> None:
    """Train on the buffer, journal every batch, publish every policy.

    One at a time: a second one takes the lease and the first ends. After a kill it continues with the same batches. With
    several ranks (a learner of many processes, or torchrun) the first alone touches the log; one that dies takes the
    others with it, and all start again.
    """
    _role("train", config, [*sets, f"trainer.ranks={ranks}"] if ranks else sets)


def serve(
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
    channel: Annotated[str, typer.Option(help='stable, canary or candidate; "" takes \\[gateway] channel.')] = "",
) -> None:
    """Serve an OpenAI-compatible API on an engine, record answers with consent, follow the policy.

    Any number of them behind one address. It serves while the broker is away, and writes what waited when it is back.
    Clients need a key: headrace keys create.

    A canary listens where [bold]\\[gateway.canary][/] says, and answers the share of sessions that the other gateways send it.

    Example: [cyan]headrace serve --set gateway.listen=0.0.0.0:8000[/]
    """
    _role("serve", config, [*sets, f"gateway.channel={channel}"] if channel else sets)


def _role(role: str, config: Path, sets: list[str]) -> None:
    from infra.cli.run.roles import role_loop, run_role
    from infra.local.ranks import launched_rank

    try:
        exit_with(lambda: run_role(role, config, sets), role_loop(role))
    except typer.Exit as end:
        if (
            end.exit_code in (CONFIG_ERROR, FENCED_OUT)
            and os.environ.get(VARIABLE)
            and launched_rank(os.environ) is None
        ):
            stay_down(role, end.exit_code)
        raise
