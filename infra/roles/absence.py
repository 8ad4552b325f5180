"""Whether a role that is wanted is away for too long: an alarm that is raised once, and is over when it is back. Pure."""

MISSING_S = 30.0  # a role that was started late or again is back sooner


class Absence:
    """Of something that is looked for now and then. limit_s: away for so long, it is missing."""

    def __init__(self, limit_s: float = MISSING_S) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None
        self.missing_s = 0.0

    def look(self, now_s: float, *, wanted: bool, there: bool) -> bool:
        """Note the present state; True where the alarm is to be raised. `missing_s` is 0 but while it lasts."""
        sounded = self.missing_s > 0
        if there or not wanted:
            self._since_s, self.missing_s = None, 0.0
            return False
        if self._since_s is None:
            self._since_s = now_s
        away_s = now_s - self._since_s
        self.missing_s = away_s if away_s >= self._limit_s else 0.0
        return self.missing_s > 0 and not sounded
