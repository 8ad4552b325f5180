"""The protocol of the transport benchmark with both sides, and the Redis side, which runs in the environment of the peers.

A reader's process reads a number from each line of stdin, has its sender send so many answers, makes their arrays, and prints
a line of JSON: the seconds that it took, and a hash of what it holds.

python _transport_peer.py read|send PORT ANSWERS
"""

import hashlib
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STREAM, BATCH = "answers", 100
Arrays = list[tuple[str, Any, Any]]


def serve(read: Callable[[int], Arrays]) -> None:
    """Answer each line of stdin. read: Has N answers sent, and returns id, tokens and logprobs of each."""
    print("{}", flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        arrays = read(int(line))
        took_s = time.perf_counter() - begin
        print(json.dumps({"wall_s": took_s, "digest": digest(arrays)}), flush=True)


def digest(arrays: Arrays) -> str:
    """A hash of ids, tokens (uint32) and logprobs (float32) in any order."""
    found = hashlib.sha256()
    for name, tokens, logprobs in sorted(arrays, key=lambda each: each[0]):
        assert (str(tokens.dtype), str(logprobs.dtype)) == ("uint32", "float32")
        found.update(f"{name} {len(tokens)} {len(logprobs)} ".encode() + tokens.tobytes() + logprobs.tobytes())
    return found.hexdigest()


class Sender:
    """A process that sends as many as a line of its stdin says."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError(f"{command}: ended before it was ready")

    def go(self, number: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()


def send(port: int, file: Path) -> None:
    import redis

    answers, client = json.loads(file.read_text()), redis.Redis(port=port)
    print("{}", flush=True)
    for line in sys.stdin:
        pending = client.pipeline(transaction=False)
        for at in range(number := int(line)):
            answer = answers[at % len(answers)]
            value = {
                "id": f"{at}", "tokens": np.array(answer["tokens"], np.uint32),
                "logprobs": np.array(answer["logprobs"], np.float32), "messages": answer["messages"],
            }  # fmt: skip
            pending.xadd(STREAM, {"data": pickle.dumps(value, protocol=5)})
            if (at + 1) % BATCH == 0 or at + 1 == number:
                pending.execute()


def read(port: int, file: Path) -> None:
    import redis

    client, sender = redis.Redis(port=port), Sender([sys.executable, __file__, "send", str(port), str(file)])

    def taken(number: int) -> Arrays:
        client.delete(STREAM)
        sender.go(number)
        found: Arrays = []
        last = b"0"
        while len(found) < number:
            for _, entries in client.xread({STREAM: last}, count=BATCH, block=60_000):
                last = entries[-1][0]
                for _, entry in entries:
                    value = pickle.loads(entry[b"data"])  # of this benchmark's own sender
                    found.append((value["id"], value["tokens"], value["logprobs"]))
        return found

    serve(taken)


if __name__ == "__main__":
    {"read": read, "send": send}[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
