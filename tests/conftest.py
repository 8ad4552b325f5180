"""Shared fixtures: one embedded broker for the whole session (started by the first test that asks), names, folders."""

import asyncio
import gc
import inspect
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from infra.local.broker import EmbeddedKafka
from tests import minio
from tests.minio import MinioServer
from tests.simulator.virtual_loop import run_virtual

# Of torch, read when it is imported: the models are tiny, and processes that share the cores wait for each other's threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SEARCHES = (50_000, 20, 20)  # for garbage: after so many objects, and of so many of these those of what is older

# Folders and files. The last ones are those with an engine or ranks of their own: of what is left none takes long.
LONGEST_FIRST = (
    "tests/e2e/", "tests/trainer/", "tests/simulator/", "tests/infra/test_bench_learner",
    "tests/infra/test_bench_state", "tests/infra/test_sdk", "tests/contracts/", "tests/actors/engines/",
)  # fmt: skip


def pytest_configure() -> None:
    """Examples that are drawn slowly on a busy machine are no failure. And what is imported and collected stays until the
    end: a search for garbage in it finds nothing and takes seconds. Later ones are seldom: a search through a parsed tree
    or a model takes as long as to make it.
    """
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(*SEARCHES)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in a loop of its own, with the mark `virtual` in virtual time."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    coroutine = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if pyfuncitem.get_closest_marker("virtual"):
        run_virtual(coroutine)
    else:
        asyncio.run(coroutine)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that processes which share the files end at nearly the same time."""

    def place(item: pytest.Item) -> int:
        folders = [at for at, folder in enumerate(LONGEST_FIRST) if item.nodeid.startswith(folder)]
        return folders[0] if folders else len(LONGEST_FIRST)

    items.sort(key=place)


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


@pytest.fixture(scope="session")
def minio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MinioServer]:
    """A real one: on PATH or cached, else in Docker, else built with Go (once, minutes)."""
    data = tmp_path_factory.mktemp("minio")
    program = minio.find(minio.default_cache())
    if program is None and docker_answers():
        from testcontainers.community.minio import MinioContainer

        with MinioContainer("minio/minio:RELEASE.2025-09-07T16-13-09Z") as container:
            config = container.get_config()
            yield MinioServer(f"http://{config['endpoint']}", config["access_key"], config["secret_key"])
        return
    program = program or minio.find_or_build(minio.default_cache())
    if program is None:
        if os.environ.get("HEADRACE_REQUIRE_MINIO") == "1":
            pytest.fail("HEADRACE_REQUIRE_MINIO=1, and there is no minio on PATH, no Docker daemon and no Go")
        pytest.skip("no minio on PATH, no Docker daemon, no Go")
    with minio.running(program, data) as server:
        yield server


def docker_answers() -> bool:
    import docker
    from docker.errors import DockerException

    try:
        docker.from_env(timeout=5).ping()
    except DockerException:
        return False
    return True


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model of characters, which no test changes."""
    import torch

    from infra.cli.demo.char_model import build_char_model

    torch.set_num_threads(1)
    return str(build_char_model(tmp_path_factory.mktemp("model") / "char", seed=3))
