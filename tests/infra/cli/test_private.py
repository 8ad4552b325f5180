"""What a run keeps is its owner's alone, and what is open is told."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.gateway.access.keys import create_key, list_keys
from infra.cli.connect import store_of
from infra.cli.options import umask_of
from infra.cli.run.private import open_to_others
from infra.cli.settings import load_settings
from infra.store.directory import DirectoryStore
from infra.store.seal import Keys, app_secret
from schemas.names import keyed_subject

SUBJECT = keyed_subject(b"secret", "acme", "ann")
ROOT = Path(__file__).resolve().parents[3]


def settings_file(folder: Path, more: str = "") -> Path:
    file = folder / "headrace.toml"
    file.write_text(f'app = "bot"\n{more}\n[gateway]\n')
    return file


def others_may(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.stat().st_mode & 0o077]


def test_what_a_command_makes_is_its_owners_alone(tmp_path: Path) -> None:
    settings_file(tmp_path)
    command = [
        sys.executable,
        "-m",
        "infra.cli.main",
        "keys",
        "create",
        "--tenant",
        "t",
        "-c",
        str(tmp_path / "headrace.toml"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=120, umask=0o022)
    assert (tmp_path / "store" / "gateway" / "secret").exists() and not others_may(tmp_path / "store")
    assert not open_to_others(load_settings(tmp_path / "headrace.toml"))


@pytest.mark.parametrize(("told", "mask"), [(None, 0o077), ("027", 0o027), ("0022", 0o022), ("rw", 0o077), ("", 0o077)])
def test_a_group_may_be_let_in_and_nonsense_lets_nobody_in(told: str | None, mask: int) -> None:
    assert umask_of({} if told is None else {"HEADRACE_UMASK": told}) == mask


def test_secrets_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    Keys(store).of(SUBJECT), create_key(store, tenant="t", scopes=("serve",), train="no", rpm=0, tpm=0)
    store.put("policies/main/1", b"weights")
    opened = {path.partition(str(tmp_path))[2].split("/")[1] for path in others_may(tmp_path)}
    assert opened <= {"policies", ".incoming"}
    assert {path.name for path in tmp_path.iterdir()} >= {"keys", "gateway"}


def test_what_is_open_is_told_with_what_to_do(tmp_path: Path) -> None:
    settings = load_settings(settings_file(tmp_path))
    for name in ("state", "logs", "spool", "store/gateway"):
        (tmp_path / name).mkdir(parents=True, mode=0o755)
    (tmp_path / "store" / "gateway" / "secret").write_bytes(b"s")
    told = open_to_others(settings)
    for name in ("state", "logs", "spool", "store", "store/gateway", "store/gateway/secret"):
        assert any(line.startswith(f"{tmp_path / name}: others may look into it") for line in told), name
    assert all("chmod -R go-rwx" in line for line in told)
    for path in (tmp_path / "state", tmp_path / "logs", tmp_path / "spool", tmp_path / "store"):
        subprocess.run(["chmod", "-R", "go-rwx", str(path)], check=True)
    assert not open_to_others(settings)


def test_what_seals_and_signs_lies_where_the_settings_say_and_nowhere_else(tmp_path: Path) -> None:
    settings = load_settings(settings_file(tmp_path, '[store]\nkeys = "secrets"\n'))
    store = store_of(settings)
    store.put("policies/main/1", b"weights")
    secret, key_id = app_secret(store), Keys(store).of(SUBJECT).key_id
    create_key(store, tenant="t", scopes=("serve",), train="no", rpm=0, tpm=0)
    assert len(list_keys(store)) == 1 and store.size("gateway/secret") == len(secret)
    data, secrets = DirectoryStore(tmp_path / "store"), DirectoryStore(tmp_path / "secrets")
    assert list(data.keys("")) == ["policies/main/1"]
    assert [name.split("/")[0] for name in secrets.keys("")] == ["gateway", "gateway", "keys"]
    assert sorted(store.keys("")) == sorted([*data.keys(""), *secrets.keys("")]) == list(store.keys(""))
    assert list(store.keys("policies/")) == ["policies/main/1"]
    assert Keys(store).destroy(SUBJECT) == (key_id,)
    store.delete("gateway/secret"), store.delete("policies/main/1")
    assert not list(data.keys("")) and "gateway/secret" not in list(secrets.keys(""))
