"""A server that gives roles for a web identity, as AWS's STS does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import msgspec
from minio.credentials import Credentials

STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{access}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>
<SessionToken>{token}</SessionToken><Expiration>{until}</Expiration></Credentials>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""


class Platform(msgspec.Struct):
    """A running server. mint: the keys it gives next. lasts_s: how long they are said to last. tokens: that it was shown.
    token: the one web identity it knows. given: how often it gave keys.
    """

    mint: Callable[[], Credentials]
    url: str = ""
    token: str = "token-1"
    lasts_s: float = 3600.0
    given: int = 0


@contextmanager
def platform(mint: Callable[[], Credentials]) -> Iterator[Platform]:
    """Serve until the end of the block."""
    here = Platform(mint)

    class PlatformHandler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = parse_qs(urlsplit(self.path).query)
            if asked.get("WebIdentityToken") != [here.token] or asked["RoleArn"] != ["arn:explorer"]:
                self._say(403, "")
                return
            keys, until = next_keys()
            self._say(
                200, STS.format(access=keys.access_key, secret=keys.secret_key, token=keys.session_token, until=until)
            )

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    def next_keys() -> tuple[Credentials, str]:
        here.given += 1
        until = datetime.now(UTC) + timedelta(seconds=here.lasts_s)
        return here.mint(), until.strftime("%Y-%m-%dT%H:%M:%SZ")

    server = ThreadingHTTPServer(("127.0.0.1", 0), PlatformHandler)
    here.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()
