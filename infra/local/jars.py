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
from typing import NamedTuple

from infra.files import file_sha256
from schemas.errors import ConfigError

VERSION = "4.3.1"
LOCK = Path(__file__).with_name(f"kafka-{VERSION}.lock")
JARS_VARIABLE = "HEADRACE_KAFKA_JARS"
NUM_DOWNLOADS = 8

logger = logging.getLogger(__name__)


class Jar(NamedTuple):
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
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return tuple(Jar(*line.replace(" ", ":").split(":")) for line in lines)


def class_path() -> str:
    """Java class path of the broker, from the folder `HEADRACE_KAFKA_JARS`, else the user's cache, which it fills.

    Raises ConfigError, naming the ways out, without one.
    """
    if given := os.environ.get(JARS_VARIABLE):
        jars = sorted(Path(given).rglob("*.jar"))
        if not any(path.name.startswith("kafka_2.") for path in jars):
            raise ConfigError(
                f"Kafka jars: got {given} with {len(jars)} jars and no kafka_2.*.jar, expected `libs/` of a Kafka "
                f"{VERSION} distribution; fix {JARS_VARIABLE}, or set kafka.bootstrap_servers to a broker that is running"
            )
        return os.pathsep.join(map(str, jars))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / f"kafka-{VERSION}"
    lock = read_lock()
    if damaged := _damaged(cache, lock):
        logger.info("kafka.jars.fetch folder=%s missing=%d", cache, len(damaged))
        _fetch(cache, lock)
    return os.pathsep.join(str(cache / jar.file_name) for jar in lock)


def _damaged(folder: Path, lock: Sequence[Jar]) -> list[str]:
    """Names of the jars that are absent from `folder` or have another sha256 than in the lock."""
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
