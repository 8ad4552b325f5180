"""What one unit of work costs, read from what `headrace bench … --json` printed.

One file a benchmark, `<its name>.json`. Files of a folder that the user names go first; `measured/` beside this file has what
is shipped: two cores of 2.5 GHz, shared with other work. Of rounds the median counts, since machines that serve are busy too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import ConfigError

SHIPPED = Path(__file__).parent / "measured"
OURS = "headrace"
SHORT, LONG, ALONE = "16 x (6 + 5)", "16 x (200 + 500)", "1 x (200 + 500)"  # cases of `bench hop`
SHORT_TOKENS, LONG_TOKENS, WAITING_TOKENS = 11, 700, 120  # of an answer and its prompt; the last of `bench feedback`
IN_A_RECORD = 16
TRAINED = "16 answers of 256 to one prompt of 512"  # a shape of `bench learner`


class UnitCost(msgspec.Struct, frozen=True):
    """One cost. what: costs it. value: in `unit`. unit: of one. source: the benchmark and its figure, and whether it is
    shipped.

    Example: UnitCost("verify, 16 x (6 + 5)", 78.0, "µs of CPU", "bench hop: shipped")
    """

    what: str
    value: float
    unit: str
    source: str


class UnitCosts(msgspec.Struct, frozen=True):
    """All of them, of one answer unless stated otherwise. verify, collect: in a group of 16, short and long. alone: verify
    of a lone one. waits: collect of one that waits for feedback. word: of feedback, joined. request: at the gateway. event: a
    streamed token. learner: sampled tokens that one trainer takes a second, None where it was not measured.
    """

    verify: tuple[UnitCost, UnitCost]
    collect: tuple[UnitCost, UnitCost]
    alone: UnitCost
    waits: UnitCost
    word: UnitCost
    request: UnitCost
    event: UnitCost
    learner: UnitCost | None = None

    def every(self) -> list[UnitCost]:
        """One after the other."""
        found = [*self.verify, *self.collect, self.alone, self.waits, self.word, self.request, self.event]
        return found if self.learner is None else [*found, self.learner]


def read_costs(own: Path | None = None) -> UnitCosts:
    """What was measured. own: a folder with what benchmarks printed. Raises ConfigError for what cannot be read."""

    def of_rounds(case: str) -> UnitCost:
        return _cost(own, "hop", case, lambda rows: _median_us(rows, case))

    def a_second(name: str, figure: str) -> UnitCost:
        return _cost(own, name, figure, lambda figures: 1e6 / figures[figure])

    try:
        learner = _cost(own, "learner", TRAINED, _tokens_per_s, "tokens a second")
    except FileNotFoundError:
        learner = None
    return UnitCosts(
        verify=(of_rounds(f"verify, {SHORT}"), of_rounds(f"verify, {LONG}")),
        collect=(of_rounds(f"collect, {SHORT}"), of_rounds(f"collect, {LONG}")),
        alone=of_rounds(f"verify, {ALONE}"),
        waits=a_second("feedback", "answers_per_s"),
        word=a_second("feedback", "joins_per_s"),
        request=_cost(own, "gateway", "cpu_ms_per_answer", lambda figures: 1000 * figures["cpu_ms_per_answer"]),
        event=a_second("stream", "events_per_cpu_s"),
        learner=learner,
    )


def by_tokens(costs: tuple[UnitCost, UnitCost], tokens: float) -> float:
    """Of an answer with its prompt, by their tokens: the line through the short and the long one, never below the short one.

    >>> short, long = (UnitCost("", value, "", "") for value in (66.0, 135.0))
    >>> by_tokens((short, long), 700), by_tokens((short, long), 1389), by_tokens((short, long), 1)
    (135.0, 204.0, 66.0)
    """
    return costs[0].value + more_us(costs, SHORT_TOKENS, tokens)


def more_us(costs: tuple[UnitCost, UnitCost], measured: float, tokens: float) -> float:
    """What so many tokens cost above as many as were measured, by the line through the short and the long one."""
    slope = max(0.0, costs[1].value - costs[0].value) / (LONG_TOKENS - SHORT_TOKENS)
    return slope * max(0.0, tokens - measured)


def record_cost_us(costs: UnitCosts) -> float:
    """Of a record that a stage is handed, whatever it holds: what of a lone answer's cost one of 16 in a record does not have.

    With r of a record and a of an answer, one alone costs r + a, and one of 16 costs r / 16 + a.
    """
    return max(0.0, costs.alone.value - costs.verify[1].value) * IN_A_RECORD / (IN_A_RECORD - 1)


def _cost(own: Path | None, name: str, figure: str, read: Callable[[Any], float], unit: str = "µs of CPU") -> UnitCost:
    """Raises FileNotFoundError where it was not measured."""
    mine = None if own is None else own / f"{name}.json"
    path = mine if mine is not None and mine.is_file() else SHIPPED / f"{name}.json"
    try:
        value = float(read(msgspec.json.decode(path.read_bytes())))
        if not 0 < value < float("inf"):
            raise ValueError(f"got {value}")
    except FileNotFoundError:
        raise
    except (OSError, msgspec.MsgspecError, LookupError, TypeError, ValueError, ArithmeticError, StopIteration) as error:
        expected = f"expected what `headrace bench {name} --json` prints"
        raise ConfigError(f'{path}: "{figure}": {type(error).__name__} {error}; {expected}') from error
    return UnitCost(figure, value, unit, f"bench {name}: {'shipped' if path != mine else path}")


def _median_us(rows: Any, case: str) -> float:
    """Ours of a case of `bench hop`."""
    return float(next(one["cpu_us"][1] for one in rows if (one["case"], one["name"]) == (case, OURS)))


def _tokens_per_s(figures: Any) -> float:
    return float(next(one["headrace"]["tokens_per_s"] for one in figures["shapes"] if one["shape"] == TRAINED))
