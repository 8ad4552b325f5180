"""A real MinIO server for tests and local runs: found on PATH, or built once with Go into a cache folder.

A server that is started here ends with the process that started it.
"""

import os
import secrets
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import minio
import msgspec

from infra.local.broker import HOST, choose_address
from infra.local.process import start_watched
from infra.store.s3 import S3Store, fixed_keys
from schemas.errors import ConfigError

MODULE = "github.com/minio/minio@v0.0.0-20250907161309-07c3a429bfed"
BUILD_TIMEOUT_S = 1200.0
START_TIMEOUT_S = 60.0
REGION = "us-east-1"


class MinioServer(msgspec.Struct, frozen=True):
    """A running server. endpoint: host:port. access_key, secret_key: it was started with."""

    endpoint: str
    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        return f"MinioServer({self.endpoint})"

    def store(self, bucket: str, prefix: str = "") -> S3Store:
        """A store in a bucket of this server, which is made where it is absent."""
        keys = fixed_keys(self.access_key, self.secret_key)
        host = urlsplit(self.endpoint)
        client = minio.Minio(host.netloc, credentials=keys, secure=host.scheme == "https", region=REGION)
        if not client.bucket_exists(bucket):
            client.make_bucket(bucket)
        return S3Store(bucket, prefix=prefix, endpoint=self.endpoint, credentials=keys, region=REGION)


def default_cache() -> Path:
    """Folder of headrace's downloads and builds for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace"


def find(cache: Path) -> Path | None:
    """The `minio` program on PATH or in the cache."""
    if found := shutil.which("minio"):
        return Path(found)
    target = _target(cache)
    return target if target.is_file() else None


def find_or_build(cache: Path) -> Path | None:
    """The `minio` program: found, or built into the cache now (minutes); None where there is no Go either.

    A build that fails raises ConfigError with Go's last words. A half-built program is never used.
    """
    if found := find(cache):
        return found
    go = shutil.which("go")
    if go is None:
        return None
    target = _target(cache)
    building = target.with_name(f"building-{os.getpid()}")
    building.mkdir(parents=True, exist_ok=True)
    try:
        built = subprocess.run(
            [go, "install", MODULE],
            env={**os.environ, "GOBIN": str(building)},
            cwd=building,
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
        if built.returncode:
            raise ConfigError(f"minio: go install {MODULE} failed: {built.stderr.strip()[-400:]}")
        (building / "minio").replace(target)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"minio: go install {MODULE} took over {BUILD_TIMEOUT_S:.0f} s") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


@contextmanager
def running(program: Path, data: Path) -> Iterator[MinioServer]:
    """A server on a free port of this machine with its objects in `data`, stopped on the way out."""
    server = MinioServer(f"http://{HOST}:{choose_address().port}", "headrace", secrets.token_hex(16))
    log = data / "server.log"
    watched = start_watched(
        [
            str(program),
            "server",
            "--quiet",
            "--address",
            server.endpoint.removeprefix("http://"),
            str(data / "objects"),
        ],
        log=log,
        env={
            "MINIO_ROOT_USER": server.access_key,
            "MINIO_ROOT_PASSWORD": server.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
        },
    )
    try:
        _wait_until_ready(server, watched.process, log)
        yield server
    finally:
        watched.kill_group()  # every put was synced before it was acknowledged
        watched.process.wait()
        watched.release()


def _target(cache: Path) -> Path:
    return cache / f"minio-{MODULE.rpartition('@')[2]}" / "minio"


def _wait_until_ready(server: MinioServer, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.endpoint}/minio/health/ready", timeout=1):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise ConfigError(f"minio: not ready at {server.endpoint}: {log.read_text(errors='replace').strip()[-400:]}")
