"""Making, listing and ending API keys: they lie in the object store, so any machine that reaches it will do."""

import sys
import time
from typing import Annotated

import typer
from rich.table import Table

from actors.gateway.access.keys import SCOPES, ApiKey, Scope, Train, create_key, list_keys, revoke_key
from actors.gateway.config import GatewayConfig
from infra.cli.connect import app_store
from infra.cli.options import JsonOption, SettingsFile, command
from infra.cli.terminal import Screen, print_json, printable
from infra.settings.config import duration_s
from schemas.errors import ConfigError


@command
def create(
    chosen: SettingsFile,
    tenant: Annotated[str, typer.Option(help="Tenant, the owner of the answers and feedback.")] = "default",
    scope: Annotated[
        str, typer.Option(help="Scopes, separated by commas: serve, feedback, admin (gateway); look, unseal (console).")
    ] = "serve,feedback",
    train: Annotated[
        Train, typer.Option(help="Consent to training on the key's answers: yes, no or unset. See gateway.train_on.")
    ] = "unset",
    rpm: Annotated[int, typer.Option(min=0, help="Maximum requests per minute at each gateway. 0 for no limit.")] = 0,
    tpm: Annotated[int, typer.Option(min=0, help="Maximum tokens per minute at each gateway. 0 for no limit.")] = 0,
    expires: Annotated[str, typer.Option(help='How long it lives, such as "30d".')] = "",
) -> int:
    """Create a key and print it once: the store keeps a hash. Gateways accept it within gateway.keys_reload_s.

    Example: [cyan]headrace keys create --tenant acme --train yes --rpm 600[/]
    """
    settings = chosen.load()
    if not tenant or len(tenant) > 200:
        raise ConfigError(f"--tenant: got {len(tenant)} characters, expected 1 to 200")
    lives_s = duration_s(expires) if expires else 0.0
    if expires and not lives_s:
        raise ConfigError(f"--expires: got {expires!r}, expected longer than 0")
    key, shown = create_key(
        app_store(settings), tenant=tenant, scopes=read_scopes(scope), train=train, rpm=rpm, tpm=tpm, lives_s=lives_s
    )
    known = f"gateways know it within {(settings.gateway or GatewayConfig()).keys_reload_s:g} s"
    print(printable(f"key {key.id} for tenant {tenant}; {known}. It is shown this once:"), file=sys.stderr)
    print(shown)
    return 0


@command
def show_keys(chosen: SettingsFile, as_json: JsonOption = False) -> int:
    """List the keys, without their secrets."""
    found = list_keys(app_store(chosen.load()))
    if as_json:
        shown = ("id", "tenant", "scopes", "train", "rpm", "tpm")
        rows = [
            {name: getattr(key, name) for name in shown} | {"state": _state(key, revoked)} for key, revoked in found
        ]
        print_json(rows)
        return 0
    table = Table("key", "tenant", "scopes", "train", "rpm", "tpm", "state")
    for key, revoked in found:
        rpm, tpm = str(key.rpm or "-"), str(key.tpm or "-")
        table.add_row(key.id, key.tenant, ", ".join(key.scopes), key.train, rpm, tpm, _state(key, revoked))
    Screen().print(table)
    return 0


@command
def revoke(
    chosen: SettingsFile, key: Annotated[str, typer.Argument(help="Id of the key, as listed, or the key itself.")]
) -> int:
    """Revoke a key. Gateways refuse it within gateway.keys_reload_s."""
    parts = key.split("-")
    key_id = parts[1] if len(parts) > 1 else key
    if not revoke_key(app_store(chosen.load()), key_id):
        raise ConfigError(f"keys: there is no key {key_id!r}; `headrace keys list` shows those there are")
    print(f"key {key_id} is revoked")
    return 0


def read_scopes(text: str) -> tuple[Scope, ...]:
    """The scopes named in "serve,feedback". Raises ConfigError."""
    found = tuple(scope for scope in SCOPES if scope in text.split(","))
    if not found or len(found) != len(set(text.split(","))):
        raise ConfigError(f"--scope: got {text!r}, expected any of {', '.join(SCOPES)}, joined by commas")
    return found


def _state(key: ApiKey, revoked: bool) -> str:
    return "revoked" if revoked else "expired" if key.expires_s and time.time() >= key.expires_s else "live"
