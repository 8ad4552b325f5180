"""People who rate answers of production, as closures: one person a session unless a rater is named."""

from collections.abc import Iterable

from schemas import Closure, Rating
from schemas.ids import request_group
from tests.names import session_name

BLOCK_MS = 600_000


def group_of(person: str, tenant: str = "acme", number: int = 0) -> str:
    return request_group(session_name(tenant, person), 7, number)


def rated(
    person: str,
    version: int,
    *values: float,
    at_ms: int = 0,
    trial: int = -1,
    tenant: str = "acme",
    rater: str = "",
    number: int = 0,
    revision: int = 0,
    late_ms: int = 0,
) -> Closure:
    """An answer to somebody, and what was said of it. number: of their answers."""
    ratings = tuple(Rating(source="user", value=value, rater=rater, time_ms=at_ms + late_ms) for value in values)
    return Closure(
        group=group_of(person, tenant, number), outcome="buffered", lane="live", version=version, trial=trial,
        revision=revision, ratings=ratings, answered_ms=at_ms,
    )  # fmt: skip


def crowd(name: str, version: int, people: int, down: int, **more: object) -> Iterable[Closure]:
    """So many people of one answer each, the first of whom complain."""
    for number in range(people):
        yield rated(f"{name}{version}-{number}", version, float(number >= down), **more)  # type: ignore[arg-type]
