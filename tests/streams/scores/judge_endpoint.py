"""A small OpenAI-compatible endpoint in this process, which answers as it is told and remembers what it was asked."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeJudge:
    """replies: the next ones: text, an HTTP status, or None to never answer; the last one is repeated."""

    def __init__(self) -> None:
        self.replies: list[str | int | None] = ['{"grade": 8}']
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.usage: dict[str, int] | None = {"prompt_tokens": 1000, "completion_tokens": 10}
        self.url = ""
        self.released = threading.Event()

    def next_reply(self) -> str | int | None:
        return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]


@contextmanager
def fake_judge() -> Iterator[FakeJudge]:
    """The endpoint, serving until the block ends."""
    judge = FakeJudge()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            judge.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            judge.headers.append(dict(self.headers))
            reply = judge.next_reply()
            if reply is None:
                judge.released.wait(60)
                return
            completion = {"choices": [{"message": {"role": "assistant", "content": reply}}], "usage": judge.usage}
            data = b"{}" if isinstance(reply, int) else json.dumps(completion).encode()
            self.send_response(reply if isinstance(reply, int) else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
