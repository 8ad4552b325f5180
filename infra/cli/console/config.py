"""[console]: the pages in the browser."""

import re

from infra.settings.config import Section
from infra.settings.outside import without_secrets

TLS_PORT = 443
_URL = re.compile(r"https://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::([1-9][0-9]{0,4}))?/?")


class ConsoleConfig(Section, frozen=True):
    """[console] of `headrace console`, which `headrace up` starts too.

    listen: host:port of the pages. up: whether `headrace up` starts it. url: where browsers reach it through a proxy that ends
    TLS, such as https://console.example.org, without a path; then links name it, cookies go over TLS alone, and forms are taken
    from pages of that address alone; "" where there is none. Headers of a proxy, such as X-Forwarded-Proto, are ignored.
    hosts: names by which browsers reach it besides those of `url`, `listen` and localhost, as behind a proxy without TLS; a
    request for any other is refused. beside: folders of other runs, relative to the TOML, whose curves are drawn beside this
    run's; each must have been looked at with `headrace console` once.

    Example: ConsoleConfig(listen="127.0.0.1:8400", url="https://console.example.org", beside=("../last-week",))
    """

    listen: str = "127.0.0.1:8400"
    up: bool = True
    url: str = ""
    hosts: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.url and _URL.fullmatch(self.url) is None:
            raise ValueError(
                f'got url = "{without_secrets(self.url)}", expected one such as "https://console.example.org", without a path'
            )

    @property
    def origin(self) -> str:
        """The origin that browsers name in a form from `url`; "" without one."""
        parts = _URL.fullmatch(self.url)
        if parts is None:
            return ""
        port = int(parts[2] or TLS_PORT)
        return f"https://{parts[1].lower()}" + (f":{port}" if port != TLS_PORT else "")

    @property
    def names(self) -> tuple[str, ...]:
        """Hosts that a request may be for, besides that of `listen` and localhost."""
        parts = _URL.fullmatch(self.url)
        return self.hosts if parts is None else (parts[1].lower(), *self.hosts)

    def opened_at(self, address: str) -> str:
        """Where browsers reach it. address: host:port at which it listens."""
        return self.origin or f"http://{address}"
