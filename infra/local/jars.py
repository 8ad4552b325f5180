"""The jars of Apache Kafka: pinned by name and sha256, fetched once from Maven Central, kept in the user's cache.

Guarantee: a folder of jars is complete and verified or it does not exist; nothing half-downloaded is ever run.
Ways out where the download cannot work: `HEADRACE_KAFKA_JARS` (a folder of jars, for instance `libs/` of a Kafka
distribution), or `bootstrap_servers` of a broker that is already there.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from infra.files import file_sha256
from schemas.errors import ConfigError

VERSION = "4.3.1"
LOCK = Path(__file__).with_name(f"kafka-{VERSION}.lock")
JARS_VARIABLE = "HEADRACE_KAFKA_JARS"
NUM_DOWNLOADS = 8

logger = logging.getLogger(__name__)


class Jar(msgspec.Struct, frozen=True):
    """One line of the lock file, as Maven names it."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


def read_lock() -> tuple[Jar, ...]:
    """The pinned jars: lines of `group:artifact:version sha256`."""
    jars = []
    for line in LOCK.read_text().splitlines():
        if line and not line.startswith("#"):
            coordinate, sha256 = line.split()
            group, artifact, version = coordinate.split(":")
            jars.append(Jar(group, artifact, version, sha256))
    return tuple(jars)


def cache_folder() -> Path:
    """Folder of fetched jars: `$XDG_CACHE_HOME/headrace/kafka-<version>`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / f"kafka-{VERSION}"


def class_path(folder: Path | None = None) -> str:
    """Java class path of the broker, from `folder`, else `HEADRACE_KAFKA_JARS`, else the cache (fetched if absent).

    Raises ConfigError, naming the ways out, without one.
    """
    if folder is None and (given := os.environ.get(JARS_VARIABLE)):
        folder = Path(given)
    if folder is not None:
        return os.pathsep.join(str(path) for path in _given(folder))
    lock = read_lock()
    folder = cache_folder()
    if damaged := _damaged(folder, lock):
        logger.info("kafka.jars.fetch folder=%s missing=%d", folder, len(damaged))
        _fetch(folder, lock)
    return os.pathsep.join(str(folder / jar.file_name) for jar in lock)


def _given(folder: Path) -> list[Path]:
    jars = sorted(folder.rglob("*.jar"))
    if not any(path.name.startswith("kafka_2.") for path in jars):
        raise ConfigError(
            f"Kafka jars: got {folder} with {len(jars)} jars and no kafka_2.*.jar, expected `libs/` of a Kafka "
            f"{VERSION} distribution; fix {JARS_VARIABLE}, or set kafka.bootstrap_servers to a broker that is running"
        )
    return jars


def _damaged(folder: Path, lock: Sequence[Jar]) -> list[str]:
    """Names of the jars that are absent from `folder` or are not what the lock says."""
    return [
        jar.file_name
        for jar in lock
        if not (folder / jar.file_name).exists() or file_sha256(folder / jar.file_name) != jar.sha256
    ]


def _fetch(folder: Path, lock: Sequence[Jar]) -> None:
    """Download beside `folder`, verify, rename; one process at a time, the others find it done."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            folder.with_name(f"{folder.name}.fetch").open("w") as turn,
            tempfile.TemporaryDirectory(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent) as temporary,
        ):
            fcntl.flock(turn, fcntl.LOCK_EX)
            if not _damaged(folder, lock):
                return
            complete = Path(temporary) / "jars"
            complete.mkdir()
            _download(Path(temporary) / "maven", complete, lock)
            if damaged := _damaged(complete, lock):
                raise OSError(f"sha256 differs from the lock file: {', '.join(damaged)}")
            if folder.exists():
                folder.rename(Path(temporary) / "replaced")
            complete.rename(folder)
    except (OSError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"the jars of Kafka {VERSION} could not be fetched into {folder}: {error}. Two ways out: set "
            f"kafka.bootstrap_servers to a broker that is running, or {JARS_VARIABLE} to a folder of jars "
            "(`libs/` of a Kafka distribution)"
        ) from error


def _download(maven: Path, complete: Path, lock: Sequence[Jar]) -> None:
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=maven, timeout=30)

    def download(jar: Jar) -> None:
        artifact = context.project(jar.group, jar.artifact).at_version(jar.version).artifact("", "jar")
        shutil.move(artifact.resolve(), complete / jar.file_name)

    with ThreadPoolExecutor(NUM_DOWNLOADS) as pool:
        for _ in pool.map(download, lock):
            pass
