"""Whose keys ask a bucket: each way to get them, what changes under way, and that none of them is ever shown."""

import itertools
import json
import logging
import os
from pathlib import Path

import pytest

from infra.store.s3 import S3Store, open_s3
from infra.store.s3_keys import S3Credentials, keys_of
from schemas.errors import ConfigError, StoreError
from tests import minio
from tests.infra.platform_server import CONTAINER, Platform, platform
from tests.minio import MinioServer
from tests.variables import variables

COUNT = itertools.count(1)
AT_AMAZON, ELSEWHERE = {"is_amazon": True}, {"is_amazon": False}


def mint() -> S3Credentials:
    number = next(COUNT)
    return S3Credentials(access_key=f"id-{number}", secret_key=f"secret-{number}", session_token=f"session-{number}")


def identity(folder: Path, here: Platform, token: str = "token-1") -> dict[str, str]:
    (folder / "token").write_text(f"{token}\n", "utf-8")
    return {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(folder / "token"), "AWS_ROLE_ARN": "arn:explorer", "AWS_ENDPOINT_URL_STS": here.url,
    }  # fmt: skip


def in_file(path: Path, number: int, profile: str = "default") -> None:
    path.write_text(f"[{profile}]\naws_access_key_id = id-{number}\naws_secret_access_key = secret-{number}\n", "utf-8")


@pytest.mark.parametrize("source", ["token", "container", "machine"])
def test_a_role_is_had_from_the_platform_kept_while_it_lasts_and_then_asked_for_again(
    source: str, tmp_path: Path
) -> None:
    with platform(mint) as here:
        environment = {
            "token": identity(tmp_path, here),
            "container": {"AWS_CONTAINER_CREDENTIALS_FULL_URI": here.url + CONTAINER},
            "machine": {"AWS_EC2_METADATA_SERVICE_ENDPOINT": here.url},
        }[source]
        with variables(**environment):  # as the library reads the container's
            keys = keys_of(os.environ, **ELSEWHERE)
            first = keys.retrieve()
            assert first.access_key.startswith("id-") and first.session_token
            assert keys.retrieve() == first and here.given == 1
            here.lasts_s = 0.0
            short = keys_of(os.environ, **ELSEWHERE)
            assert short.retrieve() != short.retrieve() and here.given == 3
            assert first.secret_key in keys.secrets and first.session_token in keys.secrets


def test_keys_in_a_file_are_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    in_file(path, 1, "team")
    keys = keys_of({"AWS_SHARED_CREDENTIALS_FILE": str(path), "AWS_PROFILE": "team"}, **AT_AMAZON)
    assert keys.retrieve().secret_key == "secret-1"
    in_file(path, 2, "team")
    os.utime(path, ns=(1, 1))
    assert keys.retrieve().secret_key == "secret-2"
    in_file(path, 3, "others")
    with pytest.raises(ValueError, match=f"no keys from AWS_SHARED_CREDENTIALS_FILE {path}, profile team"):
        keys.retrieve()
    path.unlink()
    with pytest.raises(ValueError, match="FileNotFoundError"):
        keys.retrieve()


def test_keys_of_the_environment_go_before_a_role() -> None:
    both = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s", "AWS_WEB_IDENTITY_TOKEN_FILE": "/none"}
    assert keys_of(both, **AT_AMAZON).retrieve().access_key == "id"


@pytest.mark.parametrize(
    ("environment", "where"),
    [({}, ELSEWHERE), ({"AWS_EC2_METADATA_DISABLED": "true"}, AT_AMAZON), ({"AWS_ACCESS_KEY_ID": "id"}, AT_AMAZON)],
)
def test_where_nothing_names_keys_it_is_said_what_does(environment: dict[str, str], where: dict[str, bool]) -> None:
    with pytest.raises(ConfigError, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        keys_of(environment, **where)


@pytest.mark.parametrize("case", ["refused", "away", "no token"])
def test_a_role_that_cannot_be_had_is_said_in_one_line_that_shows_no_token(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with platform(mint) as here:
        environment = identity(tmp_path, here, "hunter2hunter2")
    if case == "no token":
        (tmp_path / "token").unlink()
    if case == "refused":
        with platform(mint) as here:
            said = refusal({**environment, "AWS_ENDPOINT_URL_STS": here.url})
        assert "refused with HTTP status 403" in said
    else:
        said = refusal(environment)
    assert "no keys from http://127.0.0.1:" in said and "AWS_ROLE_ARN arn:explorer" in said
    assert "hunter2" not in said + caplog.text and "\n" not in said


def refusal(environment: dict[str, str]) -> str:
    store = open_s3("bucket", "app", {**environment, "HEADRACE_S3_ENDPOINT": "http://127.0.0.1:1"})
    with pytest.raises(StoreError) as caught:
        store.get("key")
    assert caught.value.retriable and caught.value.__cause__ is None
    return str(caught.value) + repr(store)


def limited(server: MinioServer, allowed: tuple[str, ...]) -> S3Credentials:
    """Temporary keys of a server for some rights on one bucket."""
    from minio.credentials import AssumeRoleProvider

    rule = {
        "Effect": "Allow", "Action": [f"s3:{one}" for one in allowed],
        "Resource": ["arn:aws:s3:::roles", "arn:aws:s3:::roles/*"],
    }  # fmt: skip
    keys = AssumeRoleProvider(
        sts_endpoint=server.endpoint,
        access_key=server.access_key,
        secret_key=server.secret_key,
        policy=json.dumps({"Version": "2012-10-17", "Statement": [rule]}),
    ).retrieve()
    return S3Credentials(access_key=keys.access_key, secret_key=keys.secret_key, session_token=keys.session_token)


@pytest.mark.full
def test_a_bucket_is_used_with_a_role_whose_keys_change_under_way(minio_server: MinioServer, tmp_path: Path) -> None:
    minio_server.store("roles")
    every = ("GetObject", "PutObject", "ListBucket", "DeleteObject")
    with platform(lambda: limited(minio_server, every)) as here:
        here.lasts_s = 0.0  # every request asks for new ones
        environment = {
            **identity(tmp_path, here),
            "HEADRACE_S3_ENDPOINT": minio_server.endpoint,
            "AWS_REGION": minio.REGION,
        }
        store: S3Store = open_s3("roles", "app", environment)
        store.put("a", b"x" * 20_000_000)
        assert store.get("a") == b"x" * 20_000_000 and list(store.keys("")) == ["a"]
        assert here.given > 3
        here.mint = lambda: limited(minio_server, ("GetObject",))  # the bucket turns read-only for the role
        assert store.get("a")[:1] == b"x"
        with pytest.raises(StoreError, match="AccessDenied") as caught:
            store.put("b", b"y")
        assert not caught.value.retriable and not any(one in str(caught.value) for one in store._keys.secrets)
        here.mint = lambda: limited(minio_server, every)
        store.delete("a")
