"""Secrets that settings name and never hold: in a variable of the environment, or in a file, as platforms mount them."""

import os
from collections.abc import Mapping
from pathlib import Path

from schemas.errors import ConfigError


def read_secret(
    setting: str, env: str, file: str, folder: Path | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """Secret in the file if a file is named, without blanks around it, else in the variable. No error shows it.

    setting: its name without `_env` and `_file`. folder: of the TOML, None where it is not known; the path is absolute then.
    Raises ConfigError.
    """
    if not file:
        if found := environment.get(env, ""):
            return found
        raise ConfigError(
            f"{setting}_env: the environment has no {env}; set it, or name a file in {setting.rpartition('.')[2]}_file"
        )
    if folder is None and not Path(file).is_absolute():
        raise ConfigError(f'{setting}_file: got "{file}", expected an absolute path')
    path = (folder or Path()) / file
    try:
        found = path.read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{setting}_file: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:  # the error would show the file's content
        raise ConfigError(f"{setting}_file: {path} holds no text") from None
    if not found:
        raise ConfigError(f"{setting}_file: {path} is empty")
    return found


def bearer(token_env: str, token_file: str) -> dict[str, str]:
    """The header of a bearer token that an option names; none where none does. Raises ConfigError."""
    if not token_env and not token_file:
        return {}
    return {"Authorization": f"Bearer {read_secret('token', token_env, token_file)}"}
