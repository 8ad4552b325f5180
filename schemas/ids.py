"""How things in the log are named, so that an id alone says where its record lives.

group        <task>.<round>                       the key of every record about it
experience   <group>.<attempt>-<episode>-<part>   unique; a redelivery repeats it, a new attempt does not
answer       hr-<experience>                      what a client of the gateway sees
"""

import hashlib

ANSWER_PREFIX = "hr-"


def group_id(task: str, round: int) -> str:
    """Id of the `round`-th time `task` is drawn.

    >>> group_id("add-3745", 2)
    'add-3745.2'
    """
    return f"{task}.{round}"


def experience_id(group: str, attempt: int, episode: int, part: int = 0) -> str:
    """Id of one token sequence.

    >>> experience_id("add-3745.2", attempt=0, episode=7)
    'add-3745.2.0-7-0'
    """
    return f"{group}.{attempt}-{episode}-{part}"


def group_of(ref: str) -> str:
    """Group of an experience id or of an answer id; raises ValueError for anything else.

    >>> group_of("hr-add-3745.2.0-7-0")
    'add-3745.2'
    """
    group, dot, rest = ref.removeprefix(ANSWER_PREFIX).rpartition(".")
    if not dot or not group or rest.count("-") != 2:
        raise ValueError(f"not an experience id: got {ref!r}, expected <group>.<attempt>-<episode>-<part>")
    return group


def task_of(group: str) -> str:
    """Task of a group id.

    >>> task_of("add-3745.2")
    'add-3745'
    """
    return group.rpartition(".")[0]


def answer_id(experience: str) -> str:
    """The id a client sees for `experience`."""
    return ANSWER_PREFIX + experience


def synthetic_group(parents: tuple[str, ...], processor: str, index: int) -> str:
    """Group of an experience made from others: the same parents give the same id again, so a retry adds nothing."""
    digest = hashlib.sha256("\x00".join((*parents, processor, str(index))).encode()).hexdigest()
    return f"syn-{digest[:24]}.0"
