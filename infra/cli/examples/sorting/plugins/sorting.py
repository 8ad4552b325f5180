"""Sort words: a taskset that makes the questions, and a score that checks the answers."""

from collections.abc import Iterator
from random import Random

from headrace import Experience, Message, Task, score

WORDS = (
    *("acacia", "alder", "ash", "aspen", "beech", "birch", "cedar", "elder"),
    *("hazel", "larch", "laurel", "maple", "poplar", "rowan", "spruce", "willow"),
)


def words_to_sort(*, train: int = 2000, held_out: int = 50, seed: int = 0) -> Iterator[Task]:
    """Tasks of five words each, no list twice. The answer is the words in order."""
    random, lists = Random(seed), set[tuple[str, ...]]()
    while (number := len(lists)) < train + held_out:
        words = random.sample(WORDS, 5)
        if tuple(words) in lists:
            continue
        lists.add(tuple(words))
        question = f"Sort these words and give them alone, separated by blanks: {' '.join(words)}"
        yield Task(
            id=f"sort-{number}",
            messages=(Message(role="user", content=question),),
            answer=" ".join(sorted(words)),
            split="train" if number < train else "held-out",
        )


@score(version=1)
def in_order(experience: Experience) -> float:
    """1.0 where the last line is the answer."""
    lines = experience.response.strip().lower().splitlines()
    return float(bool(lines) and lines[-1].split() == (experience.answer or "").split())
