"""The S3 store beyond the contract: its settings, its errors, and what it keeps to itself."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from infra.store.s3 import S3Credentials, S3Store, open_s3
from schemas.errors import ConfigError, StoreError

SECRET = "hunter2hunter2"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET}


def test_settings_come_from_the_environment() -> None:
    store = open_s3("bucket", "app", {**CREDENTIALS, "HEADRACE_S3_ENDPOINT": "http://minio:9000"})
    assert repr(store) == "S3Store(s3://bucket/app/ at http://minio:9000)"


def test_headraces_own_endpoint_variable_wins() -> None:
    both = {"AWS_ENDPOINT_URL": "https://aws.example", "HEADRACE_S3_ENDPOINT": "https://own.example:9000"}
    assert "https://own.example:9000" in repr(open_s3("bucket", "", CREDENTIALS | both))


def test_without_an_endpoint_it_is_amazon() -> None:
    assert "https://s3.amazonaws.com" in repr(open_s3("bucket", "", CREDENTIALS))


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


def test_a_bucket_name_s3_does_not_allow_is_an_error_of_the_store() -> None:
    store = open_s3("No_Bucket!", "", {**CREDENTIALS, "HEADRACE_S3_ENDPOINT": "http://127.0.0.1:1"})
    with pytest.raises(StoreError, match="No_Bucket!"):
        store.get("k")


def test_a_server_that_is_not_there_is_retriable_and_tells_no_secret() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    credentials = S3Credentials(access_key="id", secret_key=SECRET, session_token=f"t-{SECRET}")
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


LARGE = bytes(range(256)) * (150 * 1024)  # 37.5 MiB: three ranges


class Unreliable(BaseHTTPRequestHandler):
    """One object by ranges. The first answer of each range breaks in its middle."""

    asked: ClassVar[list[str]] = []
    tag: ClassVar[str] = '"one"'

    def do_GET(self) -> None:
        wanted = self.headers["Range"]
        first, last = (int(number) for number in wanted.removeprefix("bytes=").split("-"))
        body = LARGE[first : last + 1]
        if self.headers.get("If-Match", self.tag) != self.tag:
            self.send_error(412)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{first + len(body) - 1}/{len(LARGE)}")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", self.tag)
        self.end_headers()
        again = wanted in self.asked
        self.asked.append(wanted)
        self.wfile.write(body if again else body[: len(body) // 2])
        self.close_connection = not again

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[Unreliable]) -> Iterator[S3Store]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield open_s3(
                "bucket", "", {**CREDENTIALS, "HEADRACE_S3_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
            )
        finally:
            server.shutdown()
            thread.join()


def test_a_large_object_is_read_by_ranges_and_each_that_breaks_is_read_again() -> None:
    Unreliable.asked.clear()
    with serving(Unreliable) as store:
        assert store.get("weights/1") == LARGE
    assert len(Unreliable.asked) == 6
    assert len(set(Unreliable.asked)) == 3


def test_parts_of_an_object_that_was_replaced_meanwhile_are_never_joined() -> None:
    class Replaced(Unreliable):
        def do_GET(self) -> None:
            type(self).tag = '"two"' if self.headers.get("If-Match") else '"one"'
            super().do_GET()

    with serving(Replaced) as store, pytest.raises(StoreError, match="get 'weights/1'"):
        store.get("weights/1")
