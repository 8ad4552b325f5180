"""People who look at a console: each walks the pages at a person's pace, in threads of a process that yields to all others.

    python -m infra.cli.bench.looking.looking URL LINK PEOPLE SECONDS      prints what they saw as JSON

A walk goes from page to page as a person would, with links that the pages hold, and rests on Flow while that is asked for
again every LIVE_S, as its script does.
"""

import http.client
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from infra.local.idle_time import take_idle_time

PAUSE_S = (2.0, 5.0)  # between two pages
LIVE_S = 3.0  # data-every of the flow
WALK = (
    "/",
    "/learning",
    "/answers",
    "an answer",
    "/answers?text=3&fate=trained",
    "/versions",
    "a version",
    "/data",
    "/privacy",
)
LINKS = {"an answer": r'href="(/answers/[^"?]+)"', "a version": r'href="(/versions/\d+)"'}


class PageViews(msgspec.Struct):
    """What people saw. took_ms: of each page. failed: pages that were none, by status."""

    took_ms: list[float] = []
    failed: dict[str, int] = {}


class Person:
    """One browser: a connection, a cookie, and the page it holds."""

    def __init__(self, url: str, link: str, seed: int, hurry: float) -> None:
        self.seen = PageViews()
        self._client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self._drawn = random.Random(seed)
        self._hurry = hurry
        self._text = ""
        self._client.request("GET", f"/enter?link={link}")
        answer = self._client.getresponse()
        answer.read()
        self._cookie = str(answer.headers.get("set-cookie", "")).partition(";")[0]

    def walk(self, until_s: float) -> None:
        """Page after page until then."""
        time.sleep(self._drawn.uniform(0, PAUSE_S[1]) / self._hurry)  # people do not begin at once
        for path, wanted_s in self._ways():
            stays_s = wanted_s / self._hurry
            if time.monotonic() + stays_s >= until_s:
                return
            self._look(path)
            time.sleep(stays_s)

    def _ways(self) -> Iterator[tuple[str, float]]:
        start = self._drawn.randrange(len(WALK))
        while True:
            for step in (*WALK[start:], *WALK[:start]):
                if step == "/":
                    yield "/", LIVE_S
                    yield from [("/?fragment=1", LIVE_S)] * self._drawn.randint(0, 3)
                    continue
                links = re.findall(LINKS[step], self._text) if step in LINKS else [step]
                if links:
                    yield self._drawn.choice(links).replace("&amp;", "&"), self._drawn.uniform(*PAUSE_S)

    def _look(self, path: str) -> None:
        began_s = time.perf_counter()
        try:
            self._client.request("GET", path, headers={"cookie": self._cookie})
            page = self._client.getresponse()
            self._text = page.read().decode("utf-8", "replace")
            status = str(page.status)
        except (OSError, http.client.HTTPException) as error:
            self._client.close()
            status = type(error).__name__
        if status == "200":
            self.seen.took_ms.append(1000 * (time.perf_counter() - began_s))
        else:
            self.seen.failed[status] = self.seen.failed.get(status, 0) + 1


def look(url: str, link: str, people: int, seconds: float, *, hurry: float = 1.0) -> PageViews:
    """What so many people saw within so many seconds. hurry: times as fast as a person."""
    until_s = time.monotonic() + seconds
    everybody = [Person(url, link, seed, hurry) for seed in range(people)]
    threads = [threading.Thread(target=one.walk, args=(until_s,)) for one in everybody]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = PageViews()
    for one in everybody:
        found.took_ms += one.seen.took_ms
        for status, count in one.seen.failed.items():
            found.failed[status] = found.failed.get(status, 0) + count
    return found


if __name__ == "__main__":
    take_idle_time()
    URL, KEY, PEOPLE, SECONDS = sys.argv[1:]
    print(msgspec.json.encode(look(URL, KEY, int(PEOPLE), float(SECONDS))).decode())
