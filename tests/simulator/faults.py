"""Faults of one seed, and bytes from outside that would run code in a process that unpickles them (promise I7).

Every seed draws its own mixture (some kinds off, some frequent), so that rare combinations come up. After `calm` nothing
fails any more, and all started work must come to its end."""

import enum
import pickle
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from tests.simulator.virtual_loop import Process

STRUCK: list[str] = []  # the whole process sees a strike, no matter which role read the bytes


def strike() -> None:
    STRUCK.append("ran")


class Bomb:
    """Unpickled, it strikes."""

    def __reduce__(self) -> tuple[object, tuple[()]]:
        return strike, ()


BOMB = pickle.dumps(Bomb())
JUNK = (b"HR\x01", b"HR\x01\x00\xff\xff\xff\xff", b"nothing", BOMB, b"HR\x01\x00" + BOMB)


class Fate(enum.Enum):
    FINE = "fine"
    LOST = "lost"
    UNCONFIRMED = "unconfirmed"
    CRASH_BEFORE = "crash before"
    CRASH_AFTER = "crash after"
    TORN = "torn"


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """Probabilities of the faults. The first eight are per request; events are the number of each in the whole run.

    skew_ms: of the workers' wall clock. focus: most stalls and crashes hit roles whose name begins so. behind: a topic whose
    readers lag by seconds at every read.
    """

    lost: float = 0.0
    unconfirmed: float = 0.0
    crash: float = 0.0
    store_failure: float = 0.0
    store_crash: float = 0.0
    altered: float = 0.0
    slow: float = 0.0
    lag: float = 0.0
    behind: str = ""
    stalls: int = 0
    cuts: int = 0
    crashes: int = 0
    lost_disks: bool = False
    skew_ms: int = 0
    focus: str = ""


def draw_mixture(random: Random) -> Mixture:
    """A mixture for one seed."""

    def maybe(most: float, share: float = 0.5) -> float:
        """Often nothing, mostly a little, now and then very much."""
        if random.random() < 0.08:
            most *= 10
        return random.random() * most if random.random() < share else 0.0

    return Mixture(
        lost=maybe(0.01), unconfirmed=maybe(0.015), crash=maybe(0.012, 0.6), store_failure=maybe(0.02),
        store_crash=maybe(0.06), slow=maybe(0.05), lag=maybe(0.15), stalls=random.choice((0, 0, 1, 2)),
        cuts=random.choice((0, 0, 1)), crashes=random.choice((0, 1, 2, 4)), lost_disks=random.random() < 0.3,
        skew_ms=random.choice((0, 0, -3000, 3000)),
        focus=random.choice(("", "", "train", "process", "explore", "master", "serve")), altered=maybe(0.05, 0.3),
    )  # fmt: skip


class Faults:
    """The dice of one seed. kill: ends a process at once."""

    def __init__(self, random: Random, mixture: Mixture, loop_time: Callable[[], float]) -> None:
        self.mixture = mixture
        self.kill: Callable[[Process], None] = lambda process: None
        self._random = random
        self._time = loop_time
        self._cut_until: dict[Process, float] = {}
        self.safe: set[Process] = set()

    def calm(self) -> None:
        """From here on nothing fails."""
        self.mixture = Mixture()
        self._cut_until.clear()

    def cut(self, process: Process, seconds: float) -> None:
        """Take a process off the network for a while."""
        self._cut_until[process] = self._time() + seconds

    def travel(self, process: Process) -> tuple[float, bool]:
        """Seconds one way takes, and whether it ends at all before the client gives up."""
        delay_s = 0.0005 + self._random.random() * 0.008
        if self.mixture.slow and self._random.random() < self.mixture.slow:
            delay_s += self._random.random() * 1.5
        cut_s = self._cut_until.get(process, 0.0) - self._time()
        if cut_s > 0:
            return cut_s + delay_s, cut_s < 3.0
        return delay_s, True

    def send_fate(self, process: Process, topic: str) -> Fate:
        mixture = self.mixture
        point = self._random.random()
        if process in self.safe:
            return Fate.FINE
        for chance, fate in (
            (mixture.lost, Fate.LOST),
            (mixture.unconfirmed, Fate.UNCONFIRMED),
            (mixture.crash / 2, Fate.CRASH_BEFORE),
            (mixture.crash / 2, Fate.CRASH_AFTER),
        ):
            if point < chance:
                return fate
            point -= chance
        return Fate.FINE

    def put_fate(self) -> Fate:
        point = self._random.random()
        mixture = self.mixture
        for chance, fate in (
            (mixture.store_failure, Fate.LOST),
            (mixture.store_failure / 2, Fate.UNCONFIRMED),
            (mixture.store_crash / 3, Fate.CRASH_BEFORE),
            (mixture.store_crash / 3, Fate.TORN),
            (mixture.store_crash / 3, Fate.CRASH_AFTER),
        ):
            if point < chance:
                return fate
            point -= chance
        return Fate.FINE

    def get_fails(self) -> bool:
        return self.mixture.store_failure > 0 and self._random.random() < self.mixture.store_failure / 4

    def get_is_altered(self) -> bool:
        return self.mixture.altered > 0 and self._random.random() < self.mixture.altered

    def lag_s(self, process: Process, topics: Sequence[str]) -> float:
        if self.mixture.behind and any(topic.endswith(f".{self.mixture.behind}") for topic in topics):
            return self._random.random() * 8.0
        if self.mixture.lag and self._random.random() < self.mixture.lag:
            return self._random.random() * 2.0
        return 0.0

    def take_count(self) -> int:
        return self._random.choice((1, 3, 100, 100))

    def shuffle(self, items: list[Any]) -> None:
        self._random.shuffle(items)
