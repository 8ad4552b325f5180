"""Measures the draws by priority and even ones: 1,000 groups from a buffer of 100,000 experiences, in groups of 16 and alone.

What is timed is all between the buffer and the list of what to train on; decoding that is timed apart. The blocks are of
one content under names of their own, their priorities spread from 0 to 1. Milliseconds are of this process's CPU time: one
core, whatever else the machine does.
"""

import statistics
import time

import msgspec
import numpy as np

from schemas import Block, Message, Span, encode, make_experience
from schemas.ids import experience_id
from trainer.buffer.buffer import Buffer
from trainer.config import LaneConfig
from trainer.loop.supply import drawn_from

NUM_EXPERIENCES = 100_000
NUM_DRAWN = 1_000
USES = 1_000_000
LANES = {"priority": LaneConfig(draw="priority", max_uses=USES), "spread": LaneConfig(draw="spread", max_uses=USES)}


def run(*, num_experiences: int = NUM_EXPERIENCES, num_drawn: int = NUM_DRAWN, rounds: int = 20) -> dict[str, float]:
    """A draw, and decoding what it drew, by the size of the groups."""
    figures: dict[str, float] = {"experiences": num_experiences, "groups_drawn": num_drawn}
    for name, size, users in (("groups_of_16", 16, 1), ("alone", 1, 1), ("alone_of_1000_users", 1, 1000)):
        buffer = filled(num_experiences // size, size, users)
        for draw, lane in LANES.items():
            times_ms = []
            for seed in range(rounds):
                started_s = time.process_time()
                pool = buffer.drawable("live")
                assert pool.column("has_ratio").all()
                drawn = drawn_from(pool, lane, num_experiences=num_drawn * size, seed=seed)
                times_ms.append((time.process_time() - started_s) * 1000)
            assert len(drawn.taken) == num_drawn
            figures |= {
                f"{name}_{draw}_ms_p50": statistics.median(times_ms),
                f"{name}_{draw}_ms_max": max(times_ms),
            }
        started_s = time.process_time()
        buffer.look_at(drawn.taken)
        figures[f"{name}_decode_ms"] = (time.process_time() - started_s) * 1000
    return figures


def filled(num_groups: int, size: int, users: int = 1) -> Buffer:
    """A buffer of the lane "live" with so many groups of `size`, by so many users of twenty tenants, or by nobody."""
    buffer = Buffer({"live": USES})
    one = group_of(size)
    frame = encode(one)
    for offset, priority in enumerate(np.random.default_rng(0).random(num_groups).tolist()):
        changes = {"group": f"live-{offset}.0", "priority": priority}
        if users > 1:
            user = offset % users
            changes |= {"tenant": f"t{user % 20}", "subject": f"u{user}"}
        members = tuple(msgspec.structs.replace(member, **changes) for member in one.experiences)
        assert buffer.add(offset, frame, Block(members)) == ""
    return buffer


def group_of(size: int) -> Block:
    """One group of answers of 100 tokens."""
    return Block(
        tuple(
            make_experience(
                tokens=range(1, 141),
                logprobs=[-0.5] * 100,
                messages=(Message(role="user", content="How far?"), Message(role="assistant", content="240 km")),
                id=experience_id("live.0", 0, episode),
                group="live.0",
                episode=episode,
                group_size=size,
                lane="live",
                spans=(Span(40, 140, 3),),
            )
            for episode in range(size)
        )
    )
