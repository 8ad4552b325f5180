"""API keys of the gateway.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from typing import Annotated

import typer

from infra.cli.options import DEFAULT, ConfigOption, JsonOption, SetOption, exit_with


def create(
    tenant: Annotated[str, typer.Option(help="Whose answers and feedback these are.")] = "default",
    scope: Annotated[
        str,
        typer.Option(
            help="Any of serve, feedback, admin (the gateway's), look, operate, unseal (the console's), with commas."
        ),
    ] = "serve,feedback",
    train: Annotated[
        str, typer.Option(help="yes, no or unset: may what this key serves be trained on? See gateway.train_on.")
    ] = "unset",
    rpm: Annotated[int, typer.Option(min=0, help="Requests a minute at each gateway, 0 for no limit.")] = 0,
    tpm: Annotated[int, typer.Option(min=0, help="Tokens a minute at each gateway, 0 for no limit.")] = 0,
    expires: Annotated[str, typer.Option(help='How long it lives, such as "30d".')] = "",
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Make a key and print it, once: the store keeps a hash. Gateways know it within gateway.keys_reload_s.

    Example: [cyan]headrace keys create --tenant acme --train yes --rpm 600[/]
    """
    from infra.cli.data.keys import run_create

    exit_with(lambda: run_create(config, sets, tenant, scope, train, rpm, tpm, expires))


def list_keys(config: ConfigOption = DEFAULT, sets: SetOption = [], as_json: JsonOption = False) -> None:  # noqa: B006
    """List the keys, without their secrets."""
    from infra.cli.data.keys import run_list

    exit_with(lambda: run_list(config, sets, as_json))


def revoke(
    key: Annotated[str, typer.Argument(help="Id of the key, as listed, or the key itself.")],
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """End a key. Gateways refuse it within gateway.keys_reload_s."""
    from infra.cli.data.keys import run_revoke

    exit_with(lambda: run_revoke(config, sets, key))
