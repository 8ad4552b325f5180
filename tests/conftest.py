"""What tests share: one embedded broker for the whole session (started by the first test that asks), names, folders."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.local.broker import EmbeddedKafka


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of a broker that all tests of the session share: use `app_name` to stay apart."""
    with EmbeddedKafka(tmp_path_factory.mktemp("kafka")) as broker:
        yield broker.bootstrap


@pytest.fixture
def app_name() -> str:
    """A topic prefix no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    """An empty folder for an object store."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder
