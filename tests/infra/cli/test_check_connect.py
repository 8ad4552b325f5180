"""`headrace check --connect`: what it says of store and broker. Rights at a real one: tests/e2e/test_secured_kafka.py."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infra.cli.check.connect import groups_of, object_fault, store_tried
from infra.cli.main import app
from infra.cli.settings import load_settings
from infra.local.address import HOST, choose_address
from infra.store.memory import MemoryStore
from schemas.errors import StoreError


class Denying(MemoryStore):
    """A store whose rights lack some verbs."""

    def __init__(self, *denied: str) -> None:
        super().__init__()
        self.denied = denied

    def _check(self, verb: str) -> None:
        if verb in self.denied:
            raise StoreError(f"{verb}: AccessDenied")

    def put(self, key: str, data: bytes) -> None:
        self._check("put")
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._check("get")
        return super().get(key)

    def keys(self, prefix: str) -> Iterator[str]:
        self._check("list")
        return super().keys(prefix)

    def delete(self, key: str) -> None:
        self._check("delete")
        super().delete(key)


@pytest.mark.parametrize("denied", [(), ("get",), ("list",), ("delete",), ("list", "get"), ("put",), ("put", "get")])
def test_each_right_that_a_bucket_lacks_is_named(denied: tuple[str, ...]) -> None:
    store = Denying(*denied)
    said = object_fault(store, "checks/check-1")
    expected = denied[:1] if "put" in denied else denied  # what was not put cannot be asked for
    assert [verb for verb in ("put", "list", "get", "delete") if f"may not {verb}" in said] == sorted(
        expected, key=("put", "list", "get", "delete").index
    )
    store.denied = ()
    assert list(store.keys("")) == (["checks/check-1"] if "delete" in denied else [])


def test_a_store_that_gives_back_other_bytes_is_named() -> None:
    class Other(MemoryStore):
        def get(self, key: str) -> bytes:
            return b"something else"

    assert object_fault(Other(), "checks/check-1") == "may not get: other bytes came back"


def test_where_keys_lie_apart_both_places_are_tried(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('app = "t"\n[store]\nurl = "weights"\nkeys = "secrets"\n')
    tried = list(store_tried(load_settings(tmp_path / "headrace.toml")))
    assert [one.what for one in tried] == ["store weights", "keys secrets"] and not any(one.fault for one in tried)
    assert (tmp_path / "weights" / "checks").is_dir() and (tmp_path / "secrets" / "gateway").is_dir()


def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('app = "t"\n[store]\nurl = "s3://bucket"\n')
    # The machine's role is not asked for.
    without = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_EC2_METADATA_DISABLED": "true"}
    done = CliRunner().invoke(
        app,
        ["check", "--connect", "-c", str(tmp_path / "headrace.toml")],
        env={"COLUMNS": "200", "TERM": "dumb", **without},
    )
    (row,) = [line for line in done.stdout.splitlines() if "│ store s3://bucket" in line]
    assert done.exit_code == 1 and "AWS_ACCESS_KEY_ID" in row


def test_a_broker_that_is_not_there_is_said_and_the_store_is_tried_all_the_same(tmp_path: Path) -> None:
    nowhere = f"{HOST}:{choose_address().port}"
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n[kafka]\nbootstrap_servers = "{nowhere}"\n')
    done = CliRunner().invoke(
        app, ["check", "--connect", "-c", str(tmp_path / "headrace.toml")], env={"COLUMNS": "160", "TERM": "dumb"}
    )
    assert done.exit_code == 1 and "no broker answers within 10 s" in done.stdout
    assert "put, list, get, delete" in done.stdout


def test_every_group_that_a_role_reads_as_is_tried(tmp_path: Path) -> None:
    topic = '[[feedback]]\nname = "csat"\nuse = "a:b"\nfrom = { topic = "zendesk.closed" }\n'
    file = '[[feedback]]\nname = "review"\nuse = "a:b"\nfrom = { file = "r.jsonl" }\n'
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n{topic}{file}')
    tried = groups_of(load_settings(tmp_path / "headrace.toml"))
    assert tried == ["tasks", "explore", "verify", "collect", "feedback", "feedback.csat"]
