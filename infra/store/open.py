"""Opening the store that a URL names: a folder, or S3."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from infra.store.directory import DirectoryStore
from infra.store.s3 import open_s3
from infra.store.store import Store
from schemas.errors import ConfigError


def open_store(url: str, *, base: Path) -> Store:
    """The store at `url`: a folder (relative ones below `base`), file:///folder, or s3://bucket/prefix.

    S3's endpoint, region and credentials come from the environment: see `infra.store.s3`. Raises ConfigError.
    """
    if not url:
        raise ConfigError("[store] url: got an empty string, expected a folder or s3://bucket/prefix")
    if "://" not in url:
        return DirectoryStore(base / Path(url).expanduser())
    parts = urlsplit(url)
    if parts.scheme == "file" and not parts.netloc:
        return DirectoryStore(Path(unquote(parts.path)))
    if parts.scheme != "s3" or not parts.hostname or parts.query or parts.username:
        raise ConfigError(f"[store] url: got {_without_secrets(url)!r}, expected a folder or s3://bucket/prefix")
    return open_s3(parts.netloc, parts.path.strip("/"))


def _without_secrets(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
