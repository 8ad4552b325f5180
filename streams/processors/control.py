"""Control experiments: processors that damage data deliberately. Off unless configured."""

import hashlib
import random

import msgspec

from infra.chain.processor import processor
from schemas import Experience


@processor(version=2, of="group", inline=True)
def shuffle_advantages(group: tuple[Experience, ...]) -> tuple[Experience, ...]:
    """Permute the advantages among the members of a group, as a control experiment: same values, no relation to the answers.

    The permutation is seeded by the group id, so a retry and a replay permute alike. Turns lose their own advantages.
    """
    places = [place for place, member in enumerate(group) if member.advantage is not None]
    values = [group[place].advantage for place in places]
    seed = int.from_bytes(hashlib.sha256(group[0].group.encode()).digest()[:8], "big")
    random.Random(seed).shuffle(values)
    members = list(group)
    for place, value in zip(places, values, strict=True):
        members[place] = msgspec.structs.replace(members[place], advantage=value, advantages=())
    return tuple(members)
