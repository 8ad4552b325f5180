"""Ids in the log, which say where a record lies, and pseudonyms of tenants, sessions and people, which no dictionary undoes.

    group        <task>.<round>                       the key of every record about it, but for the gateway's
    experience   <group>.<attempt>-<episode>-<part>   unique; a redelivery repeats it, a new attempt does not
    answer       hr-<experience>                      the id that a client of the gateway sees

The gateway has no tasks and no rounds: its group is one request, <session>.<producer epoch>-<sequence>; the request's choices
are its episodes. So replicas that know nothing of each other never mint one id twice, and two turns of one session are two
groups. Their key is the session, so that one partition has all turns of a conversation.

    tenant, session -> <tag><name><check>    32, 20 and 12 letters: which tenant's, which session's, and that it was minted here
    tenant, user    -> <subject>             32 letters

These are HMAC-SHA-256 (RFC 2104) under the app's secret (`infra.store.seal.app_secret`). The check is a MAC of the rest, so a
client cannot make up a session that was never served; it also tells the consent of the key that opened the session.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable
from functools import lru_cache

import msgspec

ANSWER_PREFIX = "hr-"
# Hexadecimal in letters that begin no known kind of secret and form no run of digits, so that redaction, which looks for
# both, leaves ids alone.
_LETTERS = str.maketrans("0123456789abcdef", "bcdfhjklmnqrtvwz")
TAG_LETTERS = 32
NAME_LETTERS = 20  # 80 bits, within one tenant
CHECK_LETTERS = 12
SESSION_LETTERS = TAG_LETTERS + NAME_LETTERS + CHECK_LETTERS
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


def experience_group(id: str) -> str:
    """Group of an experience id; raises ValueError for anything else.

    >>> experience_group("hr-0042.2.0-7-0")  # of the task hr-0042
    'hr-0042.2'
    """
    group, dot, rest = id.rpartition(".")
    if not dot or not group or rest.count("-") != 2:
        raise ValueError(f"not an experience id: got {id!r}, expected <group>.<attempt>-<episode>-<part>")
    return group


def group_of(ref: str) -> str:
    """Group of an answer id or of an experience id, as clients name either; raises ValueError for anything else.

    >>> group_of("hr-add-3745.2.0-7-0")
    'add-3745.2'
    """
    return experience_group(ref.removeprefix(ANSWER_PREFIX))


def task_of(group: str) -> str:
    """Task of a group id.

    >>> task_of("add-3745.2")
    'add-3745'
    """
    return group.rpartition(".")[0]


def answer_id(experience: str) -> str:
    return ANSWER_PREFIX + experience


def synthetic_group(parents: tuple[str, ...], processor: str, index: int) -> str:
    """Return the group of an experience derived from others; the same parents give the same id, so a retry adds nothing."""
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
    """Sessions whose answers a text names by id, at any place in it; each once.

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
    return hexadecimal.translate(_LETTERS)


SUBJECT_LETTERS = 32  # 128 bits


def pseudonym(secret: bytes, kind: str, *names: str, letters: int = 32) -> str:
    """The pseudonym of names of a kind: the same for the same names, unknown without the secret. 4 bits a letter.

    >>> pseudonym(b"secret", "rater", "acme", "ann@example.org", letters=8)
    'nqjwlddn'
    """
    encoded = msgspec.json.encode((kind, *names))  # no two lists of names are spelled alike
    return spelled(hmac.digest(secret, encoded, "sha256").hex()[:letters])


def fallback_rater(key_id: str) -> str:
    """Rater of feedback that names none: the holder of the key."""
    return f"key {key_id}"


def is_person(rater: str) -> bool:
    """True if a rater is one person, as far as is known.

    >>> is_person("nqjwlddn"), is_person(fallback_rater("abcdefgh")), is_person("")
    (True, False, False)
    """
    return bool(rater) and not rater.startswith("key ")


def keyed_subject(secret: bytes, tenant: str, user: str) -> str:
    """Pseudonym of the person behind a request, "" for none."""
    return pseudonym(secret, "subject", tenant, user, letters=SUBJECT_LETTERS) if user else ""


def forgotten_mark(secret: bytes, subject: str) -> str:
    """Name of a subject in a directive `forget`: a hash that cannot be compared without the secret."""
    return pseudonym(secret, "forget", subject, letters=24)


def keyed_session(secret: bytes, tenant: str, session: str, consent: str = "") -> str:
    """A production session in ids. consent: of the key that opened it; another consent makes another session."""
    name = _tag(secret, tenant) + pseudonym(secret, "session", tenant, session, consent, letters=NAME_LETTERS)
    return name + _check(secret, name, consent)


def belongs_to(session: str, tenant: str, secret: bytes) -> bool:
    return _same(session[:TAG_LETTERS], _tag(secret, tenant))


def tenant_in(group: str) -> str:
    """The part that names the tenant in the group of a gateway's request, "" for a group of any other kind.

    >>> tenant_in("mddrffqv" * 8 + ".7-3")
    'mddrffqvmddrffqvmddrffqvmddrffqv'
    """
    return session_of(group)[:TAG_LETTERS]


def session_consent(session: str, secret: bytes, consents: Iterable[str]) -> str | None:
    """The consent, among `consents`, that a session was minted with; None for a session that was made up."""
    name, check = session[:-CHECK_LETTERS], session[-CHECK_LETTERS:]
    if len(session) != SESSION_LETTERS:
        return None
    return next((consent for consent in consents if _same(check, _check(secret, name, consent))), None)


def _same(given: str, ours: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), ours.encode())  # a client may send any letters


@lru_cache(maxsize=1024)  # each answer asks for that of its tenant
def _tag(secret: bytes, tenant: str) -> str:
    return pseudonym(secret, "tenant", tenant, letters=TAG_LETTERS)


def _check(secret: bytes, name: str, consent: str) -> str:
    return pseudonym(secret, "minted", name, consent, letters=CHECK_LETTERS)
