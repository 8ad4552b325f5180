"""Keeps the requests of `calls.py` beside it, a file for each client: `python record.py` with the Python of each environment.

They pass through a gateway with a scripted engine, since clients ask on according to what they were answered.
"""

import json
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import calls

KEPT = ("anthropic-", "openai-", "user-agent", "x-stainless-", "accept", "content-type", "x-session")


class Recorder(BaseHTTPRequestHandler):
    """Notes a request and passes it on."""

    protocol_version = "HTTP/1.1"
    upstream = ""
    seen: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        """Any route."""
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        kept = {
            name: value for name, value in sorted(headers.items()) if name.startswith(KEPT) and "api-key" not in name
        }
        self.seen.append({"path": self.path.partition("?")[0], "headers": kept, "body": json.loads(body)})
        passed = {name: headers[name] for name in ("authorization", "x-api-key", "content-type") if name in headers}
        request = urllib.request.Request(self.upstream + self.path, body, passed)
        try:
            with urllib.request.urlopen(request) as response:
                status, kind, answer = response.status, response.headers["content-type"], response.read()
        except urllib.error.HTTPError as error:
            status, kind, answer = error.code, "application/json", error.read()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def main(url: str, key: str) -> None:
    """url, key: of a running gateway."""
    Recorder.upstream = url
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in calls.CALLS:
        Recorder.seen = []
        calls.main(f"http://127.0.0.1:{server.server_port}", key, name)
        if Recorder.seen:
            file = Path(__file__).parent / f"{name}.json"
            file.write_text(json.dumps(Recorder.seen, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
