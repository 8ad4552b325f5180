"""Measures the draws by priority and even ones: 1,000 groups from a buffer of 100,000 experiences, in groups of 16 and alone.

What is timed is all between the buffer and the list of what to train on; decoding that is timed apart. The blocks are of
one content under names of their own, their priorities spread from 0 to 1. Milliseconds are of this process's CPU time: one
core, whatever else the machine does.

Lone answers are drawn in turn with cpprb's prioritized replay buffer, from as many rows of a number each. It draws the same
one again and again (with replacement), in proportion to priorities, and knows no groups, tenants or uses; headrace draws each
once. Reverb is not measured: it needs TensorFlow.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from infra.cli.bench.common.bench_env import bench_python, lacks
from schemas import Block, Message, Span, encode, make_experience
from schemas.ids import experience_id
from trainer.buffer.buffer import Buffer
from trainer.config import LaneConfig
from trainer.loop.supply import drawn_from

NUM_EXPERIENCES = 100_000
NUM_DRAWN = 1_000
USES = 1_000_000
Say = Callable[[str], None]
PEERS = Path(__file__).parents[1] / "peers"
LANES = {"priority": LaneConfig(draw="priority", max_uses=USES), "spread": LaneConfig(draw="spread", max_uses=USES)}


def tell(line: str) -> None:
    """Who is missing, beside the figures."""
    print(line, file=sys.stderr, flush=True)


def run(
    *,
    num_experiences: int = NUM_EXPERIENCES,
    num_drawn: int = NUM_DRAWN,
    rounds: int = 20,
    python: Path | None = None,
    say: Say = tell,
) -> dict[str, float]:
    """A draw, and decoding what it drew, by the size of the groups; last those beside cpprb. python: that has it; that of the
    peers' environment by default.
    """
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
    say("draw: Reverb is left out: it needs TensorFlow, which is not installed here")
    if why := lacks("cpprb", python or bench_python()):
        say(f"draw: cpprb is left out: {why}")
        return figures
    return figures | _beside_cpprb(num_experiences, num_drawn, rounds, python or bench_python())


def _beside_cpprb(num_experiences: int, num_drawn: int, rounds: int, python: Path) -> dict[str, float]:
    """Draws by priority in turn, of lone answers; the least and the median of each."""
    buffer, lane = filled(num_experiences, 1), LANES["priority"]
    ours_ms, theirs_ms = list[float](), list[float]()
    with cpprb_draws(python, num_experiences, num_drawn) as draw:
        draw()
        for seed in range(rounds):
            started_s = time.process_time()
            drawn_from(buffer.drawable("live"), lane, num_experiences=num_drawn, seed=seed)
            ours_ms.append((time.process_time() - started_s) * 1000)
            theirs_ms.append(draw())
    return {
        "beside_cpprb_ms_min": min(ours_ms),
        "beside_cpprb_ms_p50": statistics.median(ours_ms),
        "cpprb_ms_min": min(theirs_ms),
        "cpprb_ms_p50": statistics.median(theirs_ms),
        "cpprb_over_ours": min(theirs_ms) / min(ours_ms),
    }


@contextmanager
def cpprb_draws(python: Path, num_experiences: int, num_drawn: int) -> Iterator[Callable[[], float]]:
    """What draws once from cpprb, in a process of its own; milliseconds. Raises RuntimeError where it draws wrongly."""
    command = [str(python), str(PEERS / "cpprb_draw.py"), str(num_experiences), str(num_drawn)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        asking, answers = process.stdin, process.stdout

        def draw() -> float:
            asking.write("draw\n")
            asking.flush()
            said = json.loads(answers.readline() or "{}")
            if not said.get("right"):
                raise RuntimeError(f"bench draw: cpprb draws what it should not, or ended: {said}")
            return float(said["ms"])

        yield draw
        asking.close()


def filled(num_groups: int, size: int, users: int = 1) -> Buffer:
    """A buffer of the lane "live" with so many groups of `size`, by so many users of twenty tenants, or without a user."""
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
