"""Withdrawals: a revision that only takes back what an older one put into `buffer`, in the same total order.

The mark lies in `meta` of an experience without tokens, so a withdrawal is a block like any other. It is never trained; a
copy of its group and lane that was not drawn yet goes, and a trained one stays trained.
"""

from msgspec import structs

from schemas.experience import Experience
from schemas.fields import Lane

WITHDRAWN = "withdrawn"


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
        meta={WITHDRAWN: True},
    )


def is_withdrawal(experience: Experience) -> bool:
    """Whether this takes back, and holds nothing itself."""
    return experience.meta.get(WITHDRAWN) is True
