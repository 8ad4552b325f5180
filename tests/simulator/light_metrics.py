"""Metrics that only count: what the roles do with theirs, without the exporter."""

from collections.abc import Callable, Sequence

from infra.observe.metrics import DEFAULT_BUCKETS, Metrics


class Number:
    """A counter, a gauge or a histogram that nobody exports."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float) -> None:
        self.value += value


class LightMetrics(Metrics):
    """Counters and gauges by the names that `Metrics` would give them."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._numbers: dict[str, dict[str, Number]] = {"counter": {}, "gauge": {}, "histogram": {}}

    def counter(self, name: str, **labels: str) -> Number:  # type: ignore[override]
        return self._number("counter", name, labels)

    def gauge(self, name: str, **labels: str) -> Number:  # type: ignore[override]
        return self._number("gauge", name, labels)

    def histogram(self, name: str, *, buckets: Sequence[float] = DEFAULT_BUCKETS, **labels: str) -> Number:  # type: ignore[override]
        return self._number("histogram", name, labels)

    def check(self, name: str, state: Callable[[], str]) -> None:
        """Nobody asks."""

    def counters(self) -> dict[str, float]:
        return {name: number.value for name, number in self._numbers["counter"].items()}

    def gauges(self) -> dict[str, float]:
        return {name: number.value for name, number in self._numbers["gauge"].items()}

    def _number(self, kind: str, name: str, labels: dict[str, str]) -> Number:
        if labels:
            name += "{" + ",".join(f"{key}={value}" for key, value in sorted(labels.items())) + "}"
        return self._numbers[kind].setdefault(name, Number())
