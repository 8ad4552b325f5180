"""Tasks for `actors.rollout.environments.guess`, and demonstrations of a hesitant player.

The question is only the range; the number is the task's answer, which only the environment sees. Every number is a task of each
split, so an eval plays every game.
"""

from collections.abc import Iterator
from pathlib import Path
from random import Random

from actors.tasksets.taskset import Demonstration, write_rows
from schemas import Message, Task

HIGHER, LOWER, INVALID = ">", "<", "?"
TRAIN, ALL_NUMBERS, VALIDATION = "train", "all-numbers", "validation"
HIGH, TURNS = 16, 5


def guess(*, high: int = HIGH) -> Iterator[Task]:
    """A task per number from 1 to `high`, in both splits. high: Largest number, at most 99."""
    for split in (TRAIN, ALL_NUMBERS):
        for number in range(1, high + 1):
            yield Task(
                id=f"guess-{split}-{number:02d}",
                messages=(_question(high),),
                answer=f"{number:02d}",
                split=split,
                meta={"number": f"{number:02d}"},  # for a player's own world; no prompt shows it
            )


def guess_demonstrations(
    *, seed: int = 0, high: int = HIGH, turns: int = TURNS, games: int = 600, repeats: float = 0.65
) -> Iterator[Demonstration]:
    """Each guess of a weak player, as the answer to the game so far.

    repeats: chance that a guess is the one before once more, which wastes a turn. The others are anywhere in what is left:
    the player has heard what was said, and halves nothing.
    """
    random = Random(f"guess/{seed}")
    for game in range(games):
        number, guessed, least, most = random.randint(1, high), 0, 1, high
        messages: tuple[Message, ...] = (_question(high),)
        for turn in range(turns):
            if not turn or random.random() >= repeats:
                guessed = random.randint(least, most)
            yield Demonstration(
                id=f"game-{game}-{turn}",
                messages=messages,
                response=f"{guessed:02d}",
                answer=f"{guessed:02d}",
                split=VALIDATION if game % 10 == 9 else TRAIN,
                meta={"number": f"{number:02d}"},
            )
            if guessed == number:
                break
            if guessed < number:
                hint, least = HIGHER, max(least, guessed + 1)
            else:
                hint, most = LOWER, min(most, guessed - 1)
            reply = Message(role="assistant", content=f"{guessed:02d}")
            messages = (*messages, reply, Message(role="user", content=hint))


def write_guess(folder: Path, *, seed: int = 0) -> tuple[Path, Path]:
    """Write tasks.jsonl and experts.jsonl, as `headrace load` reads them."""
    return write_rows(folder, guess(), guess_demonstrations(seed=seed))


def _question(high: int) -> Message:
    return Message(role="user", content=f"01-{high:02d}")
