"""How long an event loop stands still while a large batch is packed in a thread beside it, and while it is not.

python -m tests.trainer.pack_pauses --answers 1024 --tokens 32768
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from schemas import BatchItem, Span, make_experience
from trainer.batch.batch import TrainItem, pack

EVERY_S = 0.002
GROUP = 8


def answers(count: int, num_tokens: int) -> list[TrainItem]:
    """Random answers in groups of eight, each to a prompt of an eighth of its tokens."""
    random, prompt = np.random.default_rng(0), num_tokens // 8
    found = []
    for index in range(count):
        group = f"pauses-{index // GROUP}.0"
        experience = make_experience(
            id=f"{group}.0-{index % GROUP}-0",
            group=group,
            episode=index % GROUP,
            group_size=GROUP,
            tokens=random.integers(1, 1000, num_tokens).tolist(),
            logprobs=np.zeros(num_tokens - prompt),
            messages=(),
            spans=(Span(prompt, num_tokens, 0),),
        )
        item = BatchItem(id=experience.id, partition=0, offset=0, index=index % GROUP, lane="usual", advantage=1.0)
        found.append(TrainItem(experience, item))
    return found


async def pauses_ms(work: Callable[[], object]) -> Sequence[float]:
    """How much later than asked the loop woke, each time, while a thread did the work."""
    found: list[float] = []
    working = asyncio.create_task(asyncio.to_thread(work))
    while not working.done():
        before = time.perf_counter()
        await asyncio.sleep(EVERY_S)
        found.append((time.perf_counter() - before - EVERY_S) * 1e3)
    await working
    return found


def main() -> None:
    """Print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32_768)
    asked = parser.parse_args()
    items = answers(asked.answers, asked.tokens)
    for name, work in (("idle", lambda: time.sleep(5.0)), ("packing", lambda: pack(items, max_tokens=65_536))):
        cpu_s = time.process_time()
        found = asyncio.run(pauses_ms(work))
        p50, p99 = np.percentile(found, (50, 99))
        print(
            f"{name}: {time.process_time() - cpu_s:.1f} s of CPU; p50 {p50:.1f}, p99 {p99:.1f}, most {max(found):.1f} ms"
        )


if __name__ == "__main__":
    main()
