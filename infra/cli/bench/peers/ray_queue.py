"""A Ray Queue of answers, one an item or 64. It runs in the environment of the peers, without headrace.

python ray_queue.py ANSWERS BATCH FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.util.queue import Queue
from wire import serve  # type: ignore[import-not-found]


class Producer:
    """The side that samples: arrays of what the engine hands over."""

    def __init__(self, file: str, queue: Any, batch: int) -> None:
        self._answers = json.loads(Path(file).read_text())
        self._queue = queue
        self._batch = batch

    def go(self, number: int) -> None:
        """Send so many."""
        items: list[dict[str, Any]] = []
        for at in range(number):
            one = self._answers[at % len(self._answers)]
            value = {
                "id": f"{at}",
                "tokens": np.array(one["tokens"], np.uint32),
                "logprobs": np.array(one["logprobs"], np.float32),
                "messages": one["messages"],
            }
            items.append(value)
            if len(items) == self._batch or at + 1 == number:
                self._queue.put(items[0] if self._batch == 1 else items)
                items = []


def read(file: str, batch: int, folder: str) -> None:
    """The trainer's side."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder)
    queue = Queue()
    producer = ray.remote(Producer).remote(file, queue, batch)

    def answers(number: int) -> list[tuple[str, Any, Any]]:
        done = producer.go.remote(number)
        found: list[tuple[str, Any, Any]] = []
        while len(found) < number:
            got = queue.get()
            found += [(one["id"], one["tokens"], one["logprobs"]) for one in (got if batch > 1 else [got])]
        ray.get(done)
        return found

    serve(answers)


if __name__ == "__main__":
    read(sys.argv[1], int(sys.argv[2]), sys.argv[3])
