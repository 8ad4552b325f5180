"""Instructions that can be checked: what follows each kind, and what training never shows of the held-out ones."""

from itertools import combinations

import msgspec
import pytest

from actors.tasksets.instructions import (
    CONFLICTS,
    KINDS,
    SHOWN,
    UNSEEN_PAIRS,
    demonstrations,
    instructions,
)
from schemas import Experience, Message, Span, Task, make_experience
from streams.scores.instructions import follows
from streams.scores.instructions import instructions as share


@pytest.mark.parametrize(
    ("kind", "argument", "right", "wrong"),
    [
        ("word", "rain", ["Rain falls.", "the rain"], ["Rainbows", "", "train"]),
        ("max_words", 3, ["Rain falls here.", "rain"], ["Rain falls over there.", ""]),
        ("sentences", 2, ["It rains. We run!", 'He said "go." I went.'], ["It rains.", "It rains. We run", "A. B. C."]),
        ("lower_case", True, ["it rains.", "déjà vu"], ["It rains.", "", "..."]),
        ("no_commas", True, ["It rains and pours."], ["Rain, snow", "雨、雪", ""]),
        ("ending", "so they say", ["Rain is wet, so they say.", "so they SAY"], ["so they say it", "rain"]),
        ("start", "today", ["Today it rains.", '"today', "TODAY"], ["It rains today", "", "todays rain"]),
        ("bullets", 2, ["- rain\n- snow", "* rain\n\n* snow"], ["- rain", "rain\n- snow\n- ice", "- rain\n-"]),
        ("quotes", True, ['"It rains."', "“It rains.”"], ['It "rains"', '"rain" and "snow"', '""', '"']),
        (
            "json",
            ["size"],
            ['{"size": "big"}', '```json\n{"size": 3}\n```'],
            ["{}", '{"size": ""}', '["size"]', "size"],
        ),
    ],
)
def test_each_kind_knows_what_follows_it(kind: str, argument: object, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not follows(text, kind, argument)] == []  # type: ignore[arg-type]
    assert [text for text in wrong if follows(text, kind, argument)] == []  # type: ignore[arg-type]


def answered(spoken: tuple[Message, ...], answer: str) -> Experience:
    return make_experience(
        id="a.0-0-0", group="a.0", episode=0, group_size=1, tokens=[1, 2], logprobs=[-1.0], messages=spoken,
        spans=(Span(start=1, stop=2, version=0),), answer=answer,
    )  # fmt: skip


def test_the_score_is_the_share_that_is_followed_and_an_answer_that_was_cut_off_follows_none() -> None:
    answer = '[["word", "rain"], ["lower_case", true]]'
    spoken = (Message(role="user", content="?"), Message(role="assistant", content="Rain falls."))
    half = answered(spoken, answer)
    assert share(half) == 0.5
    assert share(msgspec.structs.replace(half, end="truncated")) == 0.0
    assert share(msgspec.structs.replace(half, answer=None)) is None
    with pytest.raises(ValueError, match="no list"):
        share(msgspec.structs.replace(half, answer="4"))


def kinds(task: Task) -> list[str]:
    return str(task.meta["kinds"]).split("+")


def pairs(task: Task) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in combinations(kinds(task), 2)}


def test_held_out_prompts_have_topics_words_and_pairs_of_kinds_that_training_never_shows() -> None:
    rows = list(instructions(seed=3))
    train = [task for task in rows if task.split in ("train", "dev")]
    held_out = [task for task in rows if task.split == "held-out"]
    arguments: list[set[str]] = []
    for tasks in (train, held_out):
        rules = [rule for task in tasks for rule in msgspec.json.decode(task.answer or "")]
        given = [word for _, argument in rules for word in (argument if isinstance(argument, list) else [argument])]
        arguments.append({word for word in given if isinstance(word, str)})
    assert not arguments[0] & arguments[1]
    assert not set().union(*map(pairs, train)) & (UNSEEN_PAIRS | CONFLICTS)
    unseen = [task for task in held_out if task.id.startswith("unseen")]
    assert len(held_out) == 200 and held_out[-len(unseen) :] == unseen and len(unseen) == 80
    assert all(bool(pairs(task) & UNSEEN_PAIRS) == (task in unseen) for task in held_out)
    assert (
        {kind for task in train for kind in kinds(task)}
        == {kind for task in held_out for kind in kinds(task)}
        == set(KINDS)
    )
    prompts = [task.messages[0].content for task in rows]
    assert len(set(prompts)) == len(prompts)
    assert rows == list(instructions(seed=3)) != list(instructions(seed=4))


def test_demonstrations_follow_their_instructions_and_show_single_kinds() -> None:
    rows = list(demonstrations(seed=3))
    for row in rows:
        rules = msgspec.json.decode(row.answer or "")
        assert len(rules) == 2 and rules[1][0] in SHOWN, row
        assert all(follows(row.response, kind, argument) for kind, argument in rules), row
    assert sum(row.split == "train" for row in rows) == 360 and len({row.id for row in rows}) == len(rows)
