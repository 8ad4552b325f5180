"""A small HTTP endpoint in this process, for what asks others over HTTP."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, bytes]
POLL_S = 0.005  # how often the server looks whether it is to end: each test waits for that


@contextmanager
def http_endpoint(answer: Callable[[str, Mapping[str, str], bytes], Reply | None]) -> Iterator[str]:
    """Its address until the block ends. answer: status and body for a path, headers and a body; None says nothing at all."""

    class EndpointHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = answer(self.path, dict(self.headers), body)
            if reply is None:
                return
            status, data = reply
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), EndpointHandler)
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
