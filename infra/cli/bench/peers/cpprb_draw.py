"""cpprb's prioritized replay buffer: as many rows as there are experiences, one number each, and draws from it.

Imports nothing of headrace: it runs in the peers' environment. Reads a line for each draw, writes its milliseconds of processor
time.

python cpprb_draw.py EXPERIENCES DRAWN
"""

import json
import sys
import time

import numpy as np


def main(num_experiences: int, num_drawn: int) -> None:
    """Until stdin ends."""
    from cpprb import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(num_experiences, {"at": {"dtype": np.int64}}, alpha=1.0)
    priorities = np.random.default_rng(0).random(num_experiences) + 1e-6
    buffer.add(at=np.arange(num_experiences), priorities=priorities)
    for _ in sys.stdin:
        begin_s = time.process_time()
        drawn = buffer.sample(num_drawn)["at"].ravel()
        took_ms = 1000 * (time.process_time() - begin_s)
        is_right = len(drawn) == num_drawn and priorities[drawn].mean() > priorities.mean()
        print(json.dumps({"ms": took_ms, "right": bool(is_right)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
