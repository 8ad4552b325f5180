"""Ids in the log: an id alone says where its record lies.

group        <task>.<round>                       the key of every record about it, but for the gateway's
experience   <group>.<attempt>-<episode>-<part>   unique; a redelivery repeats it, a new attempt does not
answer       hr-<experience>                      what a client of the gateway sees

The gateway has no tasks and no rounds: its group is one request, <session>.<producer epoch>-<sequence>, where <session> is
64 letters (see `schemas.names`); the request's choices are its episodes. So replicas that know nothing of each other never mint
one id twice, and two turns of one session are two groups. Their key is the session, so that one partition has all turns of a
conversation.
"""

import hashlib
import re

ANSWER_PREFIX = "hr-"
# Hexadecimal in letters that begin no known kind of secret and form no run of digits, so that redaction, which looks for
# both, leaves ids alone.
_LETTERS = str.maketrans("0123456789abcdef", "bcdfhjklmnqrtvwz")
SESSION_LETTERS = 64
_NAME = re.compile(rf"[bcdfhjklmnqrtvwz]{{{SESSION_LETTERS}}}")
_REQUEST = re.compile(rf"(?<![a-z])({_NAME.pattern})\.\d{{1,20}}-\d{{1,20}}(?!\d)")


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


def request_group(session: str, epoch: int, sequence: int) -> str:
    """Group of one request of a session. epoch: of the gateway that served it. sequence: its own count.

    >>> request_group("mddrffqv", 7, 3)
    'mddrffqv.7-3'
    """
    return f"{session}.{epoch}-{sequence}"


def session_of(group: str) -> str:
    """Session that a group is one request of, "" for a group of any other kind.

    >>> session_of("mddrffqv" * 8 + ".7-3") == "mddrffqv" * 8
    True
    """
    session, _, request = group.partition(".")
    return session if request.count("-") == 1 and _NAME.fullmatch(session) else ""


def sessions_in(text: str) -> tuple[str, ...]:
    """Sessions whose answers a text names, wherever in it their ids are; each once.

    >>> sessions_in(f'{{"about": ["hr-{"mddrffqv" * 8}.7-3.0-0-0", "add-3745.2.0-7-0"]}}') == ("mddrffqv" * 8,)
    True
    """
    return tuple(dict.fromkeys(_REQUEST.findall(text)))


def partition_key(group: str) -> str:
    """Key of the records about a group: all turns of a session are in one partition, in their order.

    >>> partition_key("add-3745.2")
    'add-3745.2'
    """
    return session_of(group) or group


def spelled(hexadecimal: str) -> str:
    """Hexadecimal digits as letters that redaction leaves alone."""
    return hexadecimal.translate(_LETTERS)
