"""Withdrawals: a revision that only takes back what an older one put into `buffer`, in the same total order.

It is a block like any other, of one experience without tokens. It is never trained; a
copy of its group and lane that was not drawn yet goes, and a trained one stays trained.
"""

from msgspec import structs

from schemas.experience import Experience
from schemas.fields import Lane

WITHDRAWN = "withdrawn"  # the reason it is refused with


def withdrawal_of(experience: Experience, *, lane: Lane, revision: int) -> Experience:
    """What takes `experience` back from `lane`, where older revisions than this lie."""
    empty = experience.with_bulk(tokens=(), logprobs=(), messages=(), spans=())
    return structs.replace(
        empty,
        key_id="",  # it says nothing of anybody, so it is not sealed, and outlives a key that is destroyed
        lane=lane,
        revision=revision,
        scores=(),
        reward=None,
        advantage=None,
        advantages=(),
        kind="withdrawal",
        answer=None,
        edit=None,
        notes={},
        meta={},
        join=None,
    )


def is_withdrawal(experience: Experience) -> bool:
    """Whether this takes back, and holds nothing itself."""
    return experience.kind == "withdrawal"
