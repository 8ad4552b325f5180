"""Quotas of keys: so many requests and tokens a minute, at each gateway. Pure: time is passed in.

A bucket holds one minute's worth and fills evenly. Tokens of an answer are known only afterwards, so a bucket may go
below zero, and the next request waits until it is above. Of the buckets used longest ago some are forgotten, once there are
MAX_BUCKETS: they are full again.
"""

from collections import OrderedDict

import msgspec

MINUTE_S = 60.0
MAX_BUCKETS = 65_536


class Bucket(msgspec.Struct):
    """What is left of a quota.

    per_minute: what a full one holds. left: as of at_s, below 0 after a debt. at_s: by the caller's clock.
    """

    per_minute: float
    left: float
    at_s: float

    def take(self, amount: float, now_s: float) -> float:
        """Take at once; seconds until there is enough where there is not (then nothing is taken), else 0."""
        self._fill(now_s)
        needed = min(amount, self.per_minute)
        if self.left < needed:
            return (needed - self.left) * MINUTE_S / self.per_minute
        self.left -= amount
        return 0.0

    def charge(self, amount: float, now_s: float) -> None:
        """Take what was used already, whatever is left."""
        self._fill(now_s)
        self.left -= amount

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self.at_s)  # a clock that is set back takes nothing away
        self.left = min(self.per_minute, self.left + passed_s * self.per_minute / MINUTE_S)
        self.at_s = now_s


class Quotas:
    """Buckets by key and kind."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()

    def take(self, key: str, kind: str, per_minute: int, amount: float, now_s: float) -> float:
        """Seconds to wait, 0 if it was taken. per_minute 0 is no limit."""
        return self._bucket(key, kind, per_minute, now_s).take(amount, now_s) if per_minute else 0.0

    def charge(self, key: str, kind: str, per_minute: int, amount: float, now_s: float) -> None:
        """Note what was used."""
        if per_minute:
            self._bucket(key, kind, per_minute, now_s).charge(amount, now_s)

    def _bucket(self, key: str, kind: str, per_minute: int, now_s: float) -> Bucket:
        found = self._buckets.get((key, kind))
        if found is None:
            found = self._buckets[(key, kind)] = Bucket(per_minute, per_minute, now_s)
            if len(self._buckets) > MAX_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end((key, kind))
        return found
