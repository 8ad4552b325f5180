"""Followers in processes of their own, a real S3 server, slow connections: the guarantees that a fast test cannot show."""

import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from infra.cli.bench.common import minio
from infra.cli.bench.weights.fan_out import FanOutPlan, run
from infra.cli.bench.weights.throttle import throttled
from infra.store.s3 import PART_BYTES

SMALL = FanOutPlan(mb=4, mb_per_s=8.0, hosts=2, followers=3, object_bytes=4 * PART_BYTES)


@pytest.mark.full
def test_the_engines_of_a_host_read_a_version_from_s3_once_and_over_many_connections() -> None:
    if minio.find_or_build(minio.default_cache()) is None:
        pytest.skip("no minio on PATH, and no Go to build it with")
    found = run(SMALL, lambda line: None)
    assert 1.0 <= found["cached_version_bytes_per_host"] < 1.05
    assert 3.0 <= found["alone_version_bytes_per_host"] < 3.15
    assert found["cached_delta_bytes_per_host"] < found["alone_delta_bytes_per_host"] < 4


class Large(BaseHTTPRequestHandler):
    """Any page has 300,000 bytes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "300000")
        self.end_headers()
        self.wfile.write(b"x" * 300_000)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_proxy_passes_every_byte_and_counts_it_by_door() -> None:
    with HTTPServer(("127.0.0.1", 0), Large) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with throttled(server.server_port, 1e9, 2) as (one, other):
                for _ in range(2):
                    with urllib.request.urlopen(one.url) as answer:
                        assert answer.read() == b"x" * 300_000
                assert one.connections == 2 and 600_000 < one.bytes_read < 601_000 and one.bytes_written > 0
                assert (other.connections, other.bytes_read) == (0, 0)
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", one.port))
