"""The stores beyond the contract: settings, errors, what S3 keeps to itself, and what a killed writer leaves in a folder."""

import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from minio.credentials import Credentials

from infra.files import free_and_usable
from infra.observe import failpoint
from infra.store.directory import STALE_AFTER_S, DirectoryStore
from infra.store.open import open_store
from infra.store.s3 import S3Store, fixed_keys, keys_of, open_s3
from schemas.errors import ConfigError, StoreError
from tests import minio
from tests.infra.platform_server import Platform, platform
from tests.minio import MinioServer

SECRET = "hunter2hunter2"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.mark.parametrize("missing", sorted(CREDENTIALS))
def test_missing_credentials_name_the_variables(missing: str) -> None:
    environment = {name: value for name, value in CREDENTIALS.items() if name != missing}
    with pytest.raises(ConfigError, match=r"AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
        open_s3("bucket", "", environment)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("endpoint", ["ftp://host", "http://", f"http://user:{SECRET}@host", "http://host/path"])
def test_an_endpoint_that_is_none_is_refused_without_quoting_it(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_S3_ENDPOINT") as caught:
        open_s3("bucket", "", {**CREDENTIALS, "HEADRACE_S3_ENDPOINT": endpoint})
    assert SECRET not in str(caught.value)


def test_a_server_that_is_not_there_is_retriable_and_tells_no_secret() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    credentials = fixed_keys("id", SECRET, f"t-{SECRET}")
    store = S3Store(
        "bucket", endpoint=f"http://127.0.0.1:{port}", credentials=credentials, region="us-east-1", num_retries=0
    )
    assert SECRET not in repr(credentials)
    with pytest.raises(StoreError, match=f"127.0.0.1:{port}") as caught:
        store.get("some/key")
    assert caught.value.retriable
    assert "some/key" in str(caught.value)
    assert SECRET not in str(caught.value) + repr(caught.value) + repr(store)
    assert caught.value.__cause__ is None


LARGE = bytes(range(256)) * 80_000  # two parts and a half


class Unreliable(BaseHTTPRequestHandler):
    """One object. The first answer breaks in its middle."""

    asked: ClassVar[int] = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(LARGE)))
        self.end_headers()
        self.wfile.write(LARGE if self.asked > 1 else LARGE[: len(LARGE) // 2])
        self.close_connection = self.asked == 1

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], prefix: str = "") -> Iterator[S3Store]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield open_s3(
                "bucket", prefix, {**CREDENTIALS, "HEADRACE_S3_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
            )
        finally:
            server.shutdown()
            thread.join()


def test_an_object_whose_connection_breaks_is_read_again() -> None:
    with serving(Unreliable) as store:
        assert store.get("weights/1") == LARGE
    assert Unreliable.asked == 2


class Uploads(BaseHTTPRequestHandler):
    """Takes objects in parts. broken: how often each part is refused before it is taken."""

    broken: ClassVar[int] = 1
    tries: ClassVar[Counter[int]] = Counter()
    parts: ClassVar[dict[int, bytes]] = {}
    ended: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        said = self.rfile.read(int(self.headers["Content-Length"]))
        if "uploads" in query:
            self.answer("<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>")
            return
        self.ended.append("completed")
        assert said.count(b"<PartNumber>") == len(self.parts)
        self.answer("<CompleteMultipartUploadResult><Bucket>b</Bucket><Key>k</Key></CompleteMultipartUploadResult>")

    def do_PUT(self) -> None:
        part = int(parse_qs(urlsplit(self.path).query)["partNumber"][0])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tries[part] += 1
        if self.tries[part] <= self.broken:
            if self.tries[part] % 2:
                self.send_error(503)
            self.close_connection = True
            return
        self.parts[part] = body
        self.answer("")

    def do_DELETE(self) -> None:
        self.ended.append("given up")
        self.answer("")

    def answer(self, body: str) -> None:
        self.send_response(200)
        self.send_header("ETag", '"one"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_large_object_is_put_in_parts_and_each_that_fails_is_sent_again() -> None:
    class Twice(Uploads):
        broken, tries, parts, ended = 2, Counter(), {}, []  # an error, and a connection that breaks

    with serving(Twice) as store:
        store.put("weights/1", LARGE)
    assert b"".join(Twice.parts[part] for part in sorted(Twice.parts)) == LARGE
    assert Twice.tries == {1: 3, 2: 3, 3: 3} and Twice.ended == ["completed"]


def test_an_upload_that_is_given_up_leaves_no_parts_with_the_server() -> None:
    class Never(Uploads):
        broken, tries, parts, ended = 1000, Counter(), {}, []

    with serving(Never) as store, pytest.raises(StoreError, match="put 'weights/1'") as caught:
        store.put("weights/1", LARGE)
    assert caught.value.retriable and Never.ended == ["given up"]


def test_parts_of_an_upload_that_a_killed_process_left_are_removed_when_they_are_a_day_old() -> None:
    class Left(Uploads):
        broken, tries, parts, ended = 0, Counter(), {}, []

        def do_GET(self) -> None:
            assert parse_qs(urlsplit(self.path).query)["prefix"] == ["app/"]
            now = datetime.now(UTC)
            uploads = "".join(
                f"<Upload><Key>app/{key}</Key><UploadId>{key}</UploadId>"
                f"<Initiated>{now - timedelta(hours=hours):%Y-%m-%dT%H:%M:%S.000Z}</Initiated></Upload>"
                for key, hours in (("running", 1), ("killed", 25))
            )
            self.answer(f"<ListMultipartUploadsResult><Bucket>b</Bucket>{uploads}</ListMultipartUploadsResult>")

        def do_DELETE(self) -> None:
            self.ended.append(self.path)
            self.answer("")

    with serving(Left, "app") as store:
        store.put("weights/1", LARGE)
        store.put("weights/2", LARGE)
    assert Left.ended == ["/bucket/app/killed?uploadId=killed", "completed", "completed"]


def test_a_folder_that_was_made_in_a_console_is_no_object() -> None:
    class Listing(Uploads):
        def do_GET(self) -> None:
            found = "".join(f"<Contents><Key>app/{name}</Key></Contents>" for name in ("", "a/", "a/1"))
            self.answer(f"<ListBucketResult><Name>b</Name>{found}</ListBucketResult>")

    with serving(Listing, "app") as store:
        assert list(store.keys("")) == ["a/1"]


COUNT = itertools.count(1)
AT_AMAZON, ELSEWHERE = {"is_amazon": True}, {"is_amazon": False}


def mint() -> Credentials:
    number = next(COUNT)
    return Credentials(f"id-{number}", f"secret-{number}", f"session-{number}")


def identity(folder: Path, here: Platform, token: str = "token-1") -> dict[str, str]:
    (folder / "token").write_text(token, "utf-8")
    return {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(folder / "token"), "AWS_ROLE_ARN": "arn:explorer", "AWS_ENDPOINT_URL_STS": here.url,
    }  # fmt: skip


def in_file(path: Path, number: int, profile: str = "default") -> None:
    path.write_text(f"[{profile}]\naws_access_key_id = id-{number}\naws_secret_access_key = secret-{number}\n", "utf-8")


def test_a_role_is_had_from_the_platform_kept_while_it_lasts_and_then_asked_for_again(tmp_path: Path) -> None:
    with platform(mint) as here:
        environment = identity(tmp_path, here)
        keys = keys_of(environment, **ELSEWHERE)
        first = keys.retrieve()
        assert first.access_key.startswith("id-") and first.session_token
        assert keys.retrieve() == first and here.given == 1
        here.lasts_s = 0.0
        short = keys_of(environment, **ELSEWHERE)
        assert short.retrieve() != short.retrieve() and here.given == 3
        assert first.secret_key in keys.secrets and first.session_token in keys.secrets


def test_keys_in_a_file_are_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    in_file(path, 1, "team")
    keys = keys_of({"AWS_SHARED_CREDENTIALS_FILE": str(path), "AWS_PROFILE": "team"}, **AT_AMAZON)
    assert keys.retrieve().secret_key == "secret-1"
    in_file(path, 2, "team")
    assert keys.retrieve().secret_key == "secret-2"
    in_file(path, 3, "others")
    with pytest.raises(ValueError, match=f"no keys from AWS_SHARED_CREDENTIALS_FILE {path}, profile team"):
        keys.retrieve()


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
    assert "no keys from a role (AWS_WEB_IDENTITY_TOKEN_FILE)" in said
    assert "hunter2" not in said + caplog.text and "\n" not in said


def refusal(environment: dict[str, str]) -> str:
    store = open_s3("bucket", "app", {**environment, "HEADRACE_S3_ENDPOINT": "http://127.0.0.1:1"})
    with pytest.raises(StoreError) as caught:
        store.get("key")
    assert caught.value.retriable and caught.value.__cause__ is None
    return str(caught.value) + repr(store)


def limited(server: MinioServer, allowed: tuple[str, ...], bucket: str = "roles") -> Credentials:
    """Temporary keys of a server for some rights on one bucket."""
    from minio.credentials import AssumeRoleProvider

    rule = {
        "Effect": "Allow", "Action": [f"s3:{one}" for one in allowed],
        "Resource": [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"],
    }  # fmt: skip
    return AssumeRoleProvider(
        sts_endpoint=server.endpoint,
        access_key=server.access_key,
        secret_key=server.secret_key,
        policy=json.dumps({"Version": "2012-10-17", "Statement": [rule]}),
    ).retrieve()


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


LOSSY = ["s3://bucket/x?y", "s3://bucket/x#y", "file:///x?y", "file:///x#y"]


@pytest.mark.parametrize("url", ["", "gs://bucket/x", "s3://", "https://key:hunter2@host/x", "file://host/x", *LOSSY])
def test_a_url_no_store_can_serve_is_a_config_error_without_its_secrets(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected a folder or s3://") as caught:
        open_store(url, base=tmp_path)
    assert "hunter2" not in str(caught.value)


def test_an_unfinished_put_is_never_an_object_and_is_swept_later(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("k", b"whole")
    left_behind = tmp_path / ".incoming" / "abc"
    left_behind.write_bytes(b"half an obj")
    assert list(store.keys("")) == ["k"]
    DirectoryStore(tmp_path)
    assert left_behind.exists()  # it may be of a writer that runs now
    os.utime(left_behind, (0, left_behind.stat().st_mtime - STALE_AFTER_S - 60))
    DirectoryStore(tmp_path)
    assert not left_behind.exists()
    assert store.get("k") == b"whole"


def test_a_folder_goes_with_its_last_object_and_a_put_meanwhile_makes_it_again(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a/1", b"x")
    if not (child := os.fork()):
        try:
            os.environ[failpoint.VARIABLE] = "store.before_rename=stop"
            failpoint.check()
            store.put("a/2", b"y")
            os._exit(0)
        finally:
            os._exit(1)
    os.waitpid(child, os.WUNTRACED)
    store.delete("a/1")
    is_gone = not (tmp_path / "a").exists()
    os.kill(child, signal.SIGCONT)
    assert is_gone and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and list(store.keys("")) == ["a/2"]


def test_the_free_share_of_a_disk_leaves_out_what_only_root_may_take(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    free, usable = free_and_usable(tmp_path)
    taken = (disk.f_blocks - disk.f_bfree) * disk.f_frsize
    assert usable - free == pytest.approx(taken, rel=0.01)


WRITER = """
import sys
from pathlib import Path
from infra.store.directory import DirectoryStore
store = DirectoryStore(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    for value in range(256):
        store.put("k", bytes([value]) * 2_000_000)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_whole_object(tmp_path: Path) -> None:
    DirectoryStore(tmp_path).put("k", bytes(2_000_000))
    for delay_ms in range(0, 100, 7):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(timeout=delay_ms / 1000)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        data = DirectoryStore(tmp_path).get("k")
        assert (len(data), len(set(data))) == (2_000_000, 1)


def test_a_failed_put_leaves_the_old_object_and_nothing_else(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("file", b"x")
    with pytest.raises(StoreError, match="file/below") as caught:
        store.put("file/below", b"y")
    assert caught.value.retriable
    assert store.get("file") == b"x"
    assert list((tmp_path / ".incoming").iterdir()) == []
