"""What of a run others than its owner may look into: nothing, of what is made today (see `infra.cli.options.umask_of`). What an
earlier release made, or a user opened to others, stays as it is, and is reported.
"""

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.cli.connect import kafka_folder
from infra.cli.options import umask_of
from infra.cli.settings import Settings
from infra.store.store import PRIVATE


def open_to_others(settings: Settings) -> list[str]:
    """A line for each folder of a run that others may look into, and for open secrets. Raises ConfigError."""
    refused = umask_of(os.environ) & 0o077
    places = [settings.folder / "state", settings.folder / "logs"]
    if not settings.kafka.bootstrap_servers:
        places.append(kafka_folder(settings))
    if settings.gateway is not None:
        places.append(settings.folder / settings.gateway.spool)
    if settings.trainer.tensorboard:
        places.append(settings.folder / settings.trainer.tensorboard)
    if not settings.store.use and (store := folder_of(settings.store.url, settings.folder)) is not None:
        places.append(store)
    open_ = [path for path in places if _mode(path) & refused]
    if (secrets := folder_of(settings.store.keys or settings.store.url, settings.folder)) is not None:
        inner = [secrets / name for name in (*PRIVATE, "gateway/secret")]
        open_ += [path for path in inner if _mode(path) & 0o077]
    return [f"{path}: others may look into it (mode {_mode(path):03o}); chmod -R go-rwx {path}" for path in open_]


def folder_of(url: str, base: Path) -> Path | None:
    """The folder a store lies in; None for a store elsewhere."""
    if "://" not in url:
        return base / Path(url).expanduser()
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def _mode(path: Path) -> int:
    """Rights of a file, 0 where there is none."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0
