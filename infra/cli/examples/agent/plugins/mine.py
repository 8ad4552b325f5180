"""Your own steps. Raise `version` whenever a decision changes: it is stamped on what it saw."""

from typing import Any

from headrace import Drop, Experience, Feedback, feedback, processor, score


@feedback(version=1)
def csat(ticket: dict[str, Any]) -> Feedback | None:
    """A closed ticket, 1 to 5 stars; a ticket without stars says nothing."""
    if "stars" not in ticket:
        return None
    return Feedback(ref=ticket["answer_id"], id=ticket["ticket"], value=(ticket["stars"] - 1) / 4)


@processor(version=1)
def not_trivial(experience: Experience, *, min_tokens: int = 8) -> Experience | Drop:
    """There is nothing to learn from an answer of a token or two."""
    return experience if experience.num_sampled >= min_tokens else Drop("too short")


@score(version=1)
def brief(experience: Experience, *, words: int = 200) -> float:
    """1 for an answer people read to its end."""
    return float(len(experience.response.split()) <= words)
