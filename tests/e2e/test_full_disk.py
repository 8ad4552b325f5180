"""The broker's disk is full: it ends, the gateway serves on and keeps what it may not write, and all of it is stored later."""

import asyncio
import resource
import subprocess
import time
from pathlib import Path

import openai
import pytest

from infra.local.broker import EmbeddedKafka, choose_address
from schemas.topics import EXPERIENCES
from tests.e2e.test_gateway_kafka import TOML, ask, headrace, read, running, table_in, wait_until_served

pytestmark = pytest.mark.full


def processes_of(group: int) -> list[int]:
    """Processes of a group, as the kernel lists them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) == group:
            found.append(int(folder.name))
    return found


def fill_disk(broker: EmbeddedKafka) -> None:
    """From now on no file of the broker can grow: a write ends with an error, as on a full disk."""
    assert broker.pid is not None
    for pid in processes_of(broker.pid):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))


def test_a_gateway_serves_on_while_the_brokers_disk_is_full_and_stores_all_once_there_is_room(
    app_name: str, tmp_path: Path
) -> None:
    table_in(tmp_path)
    port = choose_address().port
    log = tmp_path / "serve.log"
    with EmbeddedKafka(tmp_path / "kafka") as broker:
        (tmp_path / "headrace.toml").write_text(TOML.format(app=app_name, bootstrap=broker.bootstrap, port=port))
        subprocess.run(headrace(tmp_path, "check", "--create"), check=True, capture_output=True, timeout=120)
        made = subprocess.run(
            headrace(tmp_path, "keys", "create", "--train", "yes"),
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        client = openai.OpenAI(
            api_key=made.stdout.strip(), base_url=f"http://127.0.0.1:{port}/v1", max_retries=0, timeout=60
        )
        with running(tmp_path, "serve") as process:
            wait_until_served(client, process, log)
            before = ask(client, 5)
            asyncio.run(read(broker.bootstrap, app_name, EXPERIENCES, 5))
            fill_disk(broker)
            meanwhile = ask(client, 5)
            assert broker.wait() != 0, "a broker whose only disk fails ends"
            meanwhile += ask(client, 5)
            spooled(tmp_path)
            assert process.poll() is None
            broker.kill()
            broker.start()
            after = ask(client, 5)
            ids = [*before, *meanwhile, *after]
            recorded = asyncio.run(read(broker.bootstrap, app_name, EXPERIENCES, 20, ids))
            assert {item.id for item in recorded} == set(ids)


def spooled(folder: Path) -> None:
    """Wait until something lies in the gateway's spool."""
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in (folder / "spool").rglob("*") if path.is_file()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
