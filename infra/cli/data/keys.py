"""Making, listing and ending API keys: they lie in the object store, so any machine that reaches it will do."""

import json
import sys
import time
from pathlib import Path
from typing import get_args

from rich.table import Table

from actors.gateway.access.keys import SCOPES, ApiKey, Scope, Train, create_key, revoke_key
from actors.gateway.access.keys import list_keys as keys_in
from actors.gateway.config import GatewayConfig
from infra.cli.connect import app_store
from infra.cli.settings import load_settings
from infra.cli.terminal import Screen, printable, printable_json
from infra.settings.config import duration_s
from schemas.errors import ConfigError


def run_create(
    config: Path, sets: list[str], tenant: str, scope: str, train: str, rpm: int, tpm: int, expires: str
) -> int:
    """Print a new key on stdout, and what it is for on stderr. Raises ConfigError."""
    settings = load_settings(config, sets)
    if not tenant or len(tenant) > 200:
        raise ConfigError(f"--tenant: got {len(tenant)} characters, expected 1 to 200")
    lives_s = duration_s(expires) if expires else 0.0
    key, shown = create_key(
        app_store(settings),
        tenant=tenant,
        scopes=read_scopes(scope),
        train=read_train(train),
        rpm=rpm,
        tpm=tpm,
        lives_s=lives_s,
    )
    known = f"gateways know it within {(settings.gateway or GatewayConfig()).keys_reload_s:g} s"
    print(printable(f"key {key.id} for tenant {tenant}; {known}. It is shown this once:"), file=sys.stderr)
    print(shown)
    return 0


def run_list(config: Path, sets: list[str], as_json: bool) -> int:
    """Print the keys."""
    found = keys_in(app_store(load_settings(config, sets)))
    if as_json:
        print(printable_json(json.dumps([_shown(key, revoked) for key, revoked in found])))
        return 0
    table = Table("key", "tenant", "scopes", "train", "rpm", "tpm", "state")
    for key, revoked in found:
        rpm, tpm = str(key.rpm or "-"), str(key.tpm or "-")
        table.add_row(key.id, key.tenant, ", ".join(key.scopes), key.train, rpm, tpm, _state(key, revoked))
    Screen().print(table)
    return 0


def run_revoke(config: Path, sets: list[str], key: str) -> int:
    """End a key. Raises ConfigError where there is none."""
    parts = key.split("-")
    key_id = parts[1] if len(parts) > 1 else key
    if not revoke_key(app_store(load_settings(config, sets)), key_id):
        raise ConfigError(f"keys: there is no key {key_id!r}; `headrace keys list` shows those there are")
    print(f"key {key_id} is revoked")
    return 0


def read_scopes(text: str) -> tuple[Scope, ...]:
    """The scopes named in "serve,feedback". Raises ConfigError."""
    found = tuple(scope for scope in SCOPES if scope in text.split(","))
    if not found or len(found) != len(set(text.split(","))):
        raise ConfigError(f"--scope: got {text!r}, expected any of {', '.join(SCOPES)}, joined by commas")
    return found


def read_train(text: str) -> Train:
    """yes, no or unset. Raises ConfigError."""
    options: tuple[Train, ...] = get_args(Train)
    for option in options:
        if option == text:
            return option
    raise ConfigError(f"--train: got {text!r}, expected one of {', '.join(options)}")


def _shown(key: ApiKey, revoked: bool) -> dict[str, object]:
    return {
        "id": key.id,
        "tenant": key.tenant,
        "scopes": key.scopes,
        "train": key.train,
        "rpm": key.rpm,
        "tpm": key.tpm,
        "state": _state(key, revoked),
    }


def _state(key: ApiKey, revoked: bool) -> str:
    if revoked:
        return "revoked"
    return "expired" if key.expires_s and time.time() >= key.expires_s else "live"
