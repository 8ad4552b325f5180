"""Your own plugins. Raise `version` when a decision changes: headrace records it in every experience."""

from typing import Any

from headrace import Drop, Experience, Feedback, feedback, processor, score


@feedback(version=1)
def csat(ticket: dict[str, Any]) -> Feedback | None:
    """Rating of a closed ticket, 1 to 5 stars; a ticket without stars has no rating."""
    if "stars" not in ticket:
        return None
    return Feedback(ref=ticket["answer_id"], id=ticket["ticket"], value=(ticket["stars"] - 1) / 4)


@processor(version=1)
def not_trivial(experience: Experience, *, min_tokens: int = 8) -> Experience | Drop:
    """Drop answers that are too short to learn from."""
    return experience if experience.num_sampled >= min_tokens else Drop("too short")


@score(version=1)
def brief(experience: Experience, *, words: int = 200) -> float:
    """1 for an answer of at most `words` words."""
    return float(len(experience.response.split()) <= words)
