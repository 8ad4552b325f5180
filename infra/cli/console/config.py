"""[console]: the pages in the browser."""

from infra.settings.config import Section


class ConsoleConfig(Section, frozen=True):
    """[console] of `headrace console`, which `headrace up` starts too.

    listen: host:port of the pages. up: whether `headrace up` starts it. hosts: names by which browsers reach it besides that
    of `listen` and localhost, as behind a proxy; a request for any other is refused. beside: folders of other runs, relative to
    the TOML, whose curves are drawn beside this run's; each must have been looked at with `headrace console` once.

    Example: ConsoleConfig(listen="127.0.0.1:8400", beside=("../last-week",))
    """

    listen: str = "127.0.0.1:8400"
    up: bool = True
    hosts: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
