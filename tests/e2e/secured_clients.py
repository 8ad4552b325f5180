"""Clients of a secured broker: settings for each way in, the commands, and a stream worker."""

import asyncio
import json
import os
import subprocess
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from typer.testing import CliRunner, Result

from infra.cli.main import app
from infra.log.log import Log
from schemas import Block
from schemas.topics import EXPERIENCES, VERIFIED
from tests.e2e.secured_broker import PASSWORD, USER, Secured
from tests.streams.collect.collecting import answer, block

REPOSITORY = Path(__file__).parents[2]
SCRAM = {"sasl_mechanism": "SCRAM-SHA-256"}


def unsigned_token(expires: int = 4_000_000_000) -> str:
    """What Kafka's own test module takes: a JSON web token that nobody signed. expires: seconds since 1970."""
    parts = ({"alg": "none"}, {"sub": USER, "iat": 1_700_000_000, "exp": expires})
    return ".".join(urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts) + "."


def expired_token() -> str:
    return unsigned_token(1_700_000_100)


def broken() -> str:
    raise LookupError("the-secret-of-the-platform")


def by_token(plugin: str) -> dict[str, str]:
    """A way in by the tokens that a function of this module gives."""
    given = f"tests.e2e.secured_clients:{plugin}"
    return {"sasl_mechanism": "OAUTHBEARER", "sasl_token": given, "sasl_username": "", "sasl_password_file": ""}


def settings_file(secured: Secured, folder: Path, app_name: str, **more: str) -> Path:
    (folder / "password").write_text(PASSWORD + "\n")
    table = {
        "bootstrap_servers": secured.bootstrap,
        "security_protocol": "SASL_SSL",
        "sasl_username": USER,
        "sasl_password_file": "password",
        "ssl_ca_file": str(secured.authority),
        **more,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in table.items() if value]
    file = folder / "headrace.toml"
    file.write_text(f'app = "{app_name}"\n[kafka]\npartitions = 2\ndeadline_s = 20\n' + "\n".join(lines) + "\n")
    return file


def call(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "-c", str(config)], env={"COLUMNS": "160", "TERM": "dumb"})


@contextmanager
def stream_worker(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A stream worker as a process; ended with the block."""
    command = [sys.executable, "-m", "infra.cli.main", "process", "-c", str(config)]
    process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, env={**os.environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def through(log: Log, group: str) -> None:
    """Until a record that is published now has gone through the stream worker."""
    await log.publish(EXPERIENCES, block(answer(group, 0, size=1)))
    async with asyncio.timeout(90):
        async for message in log.read_all(VERIFIED, until_end=False):
            if isinstance(message.value, Block) and message.value.experiences[0].group == group:
                return
