"""A Redis stream of pickled answers, one a call or 100. It runs in the environment of the peers, without headrace.

python redis_stream.py read|send PORT ANSWERS BATCH
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import redis
from pickled import opened, packed  # type: ignore[import-not-found]
from wire import Sender, say, serve, told_rounds  # type: ignore[import-not-found]

STREAM = "answers"
BLOCK_MS = 60_000


def send(port: int, file: Path, batch: int) -> None:
    """The side that samples: arrays of what the engine hands over, pickled."""
    answers, client = json.loads(file.read_text()), redis.Redis(port=port)
    say({"ready": True})
    for _, number in told_rounds():
        pending = client.pipeline(transaction=False)
        for at in range(number):
            one = answers[at % len(answers)]
            value = {
                "id": f"{at}",
                "tokens": np.array(one["tokens"], np.uint32),
                "logprobs": np.array(one["logprobs"], np.float32),
                "messages": one["messages"],
            }
            entry = {"data": packed(value)}
            if batch == 1:
                client.xadd(STREAM, entry)
                continue
            pending.xadd(STREAM, entry)
            if (at + 1) % batch == 0 or at + 1 == number:
                pending.execute()


def read(port: int, file: Path, batch: int) -> None:
    """The trainer's side."""
    client = redis.Redis(port=port)
    sender = Sender([sys.executable, __file__, "send", str(port), str(file), str(batch)])

    def answers(number: int) -> list[tuple[str, Any, Any]]:
        client.delete(STREAM)
        sender.go(number)
        found: list[tuple[str, Any, Any]] = []
        last = b"0"
        while len(found) < number:
            for _, entries in client.xread({STREAM: last}, count=batch, block=BLOCK_MS):
                last = entries[-1][0]
                for _, entry in entries:
                    one = opened(entry[b"data"])
                    found.append((one["id"], one["tokens"], one["logprobs"]))
        return found

    serve(answers)


if __name__ == "__main__":
    {"read": read, "send": send}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
