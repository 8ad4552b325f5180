"""Write a short sentence: a taskset that makes the questions, and a score that checks the answers."""

import re
from collections.abc import Iterator
from random import Random

from headrace import Experience, Message, Task, score

TOPICS = "apples autumn bread bridges cats chess clouds coffee farms gardens lakes letters music owls rain ships snow"
WORDS = "always because before bright early every gentle hardly maybe never often quiet slowly small still today warm"


def sentences(*, held_out: int = 50, seed: int = 0) -> Iterator[Task]:
    """A task for each pair of topic and word, in random order. The answer is the word."""
    pairs = [(topic, word) for topic in TOPICS.split() for word in WORDS.split()]
    Random(seed).shuffle(pairs)
    for number, (topic, word) in enumerate(pairs):
        question = f'Write one sentence of four to eight words about {topic}. Use the word "{word}".'
        yield Task(
            id=f"{topic}-{word}",
            messages=(Message(role="user", content=question),),
            answer=word,
            split="held-out" if number < held_out else "train",
        )


@score(version=1)
def follows(experience: Experience) -> float:
    """The share of three rules that the answer follows: four to eight words, the word of the task, a full stop."""
    text = experience.response.strip()
    words = re.findall(r"[a-z']+", text.lower())
    return (float(4 <= len(words) <= 8) + (experience.answer in words) + text.endswith(".")) / 3
