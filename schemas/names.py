"""Names of tenants, sessions and people as a log may hold them: keyed, so that no dictionary finds whom they mean.

    tenant, session -> <tag><name><check>    32, 20 and 12 letters: which tenant's, which session's, and that it was minted here
    tenant, user    -> <subject>             32 letters

All are HMAC-SHA-256 (RFC 2104) under the app's secret (`infra.store.seal.app_secret`), spelled as `schemas.ids` spells ids.
The check is a MAC of the rest, so a client cannot make up a session that was never served; it says too what the key that
opened the session allows to be done with it.
"""

import hmac
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import msgspec

from schemas import ids

SUBJECT_LETTERS = 32  # 128 bits
TAG_LETTERS = 32
NAME_LETTERS = 20  # 80 bits, within one tenant
CHECK_LETTERS = 12
assert TAG_LETTERS + NAME_LETTERS + CHECK_LETTERS == ids.SESSION_LETTERS


def pseudonym(secret: bytes, kind: str, *names: str, letters: int = 32) -> str:
    """The pseudonym of names of a kind: the same for the same names, unknown without the secret. 4 bits a letter.

    >>> pseudonym(b"secret", "rater", "acme", "ann@example.org", letters=8)
    'nqjwlddn'
    """
    spelled = msgspec.json.encode((kind, *names))  # no two lists of names are spelled alike
    return ids.spelled(hmac.digest(secret, spelled, "sha256").hex()[:letters])


def fallback_rater(kind: Literal["key", "answer"], identity: str) -> str:
    """Rater of feedback that names none: the holder of a key, or of one answer's token."""
    return f"{kind} {identity}"


def is_person(rater: str) -> bool:
    """True if a rater is one person, as far as is known.

    >>> is_person("nqjwlddn"), is_person(fallback_rater("key", "abcdefgh")), is_person("")
    (True, False, False)
    """
    return bool(rater) and not rater.startswith(("key ", "answer "))


def keyed_subject(secret: bytes, tenant: str, user: str) -> str:
    """Pseudonym of the person behind a request, "" for none."""
    return pseudonym(secret, "subject", tenant, user, letters=SUBJECT_LETTERS) if user else ""


def forgotten_mark(secret: bytes, subject: str) -> str:
    """Name of a subject in a directive `forget`: a hash that only those who know the secret can compare."""
    return pseudonym(secret, "forget", subject, letters=24)


def keyed_session(secret: bytes, tenant: str, session: str, consent: str = "") -> str:
    """A production session in ids. consent: what the key it was opened with allows; under another it is another session."""
    name = _tag(secret, tenant) + pseudonym(secret, "session", tenant, session, consent, letters=NAME_LETTERS)
    return name + _check(secret, name, consent)


def belongs_to(session: str, tenant: str, secret: bytes) -> bool:
    """True if a session is one of the tenant's."""
    return _same(session[:TAG_LETTERS], _tag(secret, tenant))


def tenant_in(group: str) -> str:
    """The part that names the tenant in the group of a gateway's request, "" for a group of any other kind.

    >>> tenant_in("mddrffqv" * 8 + ".7-3")
    'mddrffqvmddrffqvmddrffqvmddrffqv'
    """
    return ids.session_of(group)[:TAG_LETTERS]


def session_consent(session: str, secret: bytes, consents: Iterable[str]) -> str | None:
    """The one of `consents` that a session was minted with; None for a session that was made up."""
    name, check = session[:-CHECK_LETTERS], session[-CHECK_LETTERS:]
    if len(session) != ids.SESSION_LETTERS:
        return None
    return next((consent for consent in consents if _same(check, _check(secret, name, consent))), None)


def _same(given: str, ours: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), ours.encode())  # a client may send any letters


@lru_cache(maxsize=1024)  # each answer asks for that of its tenant
def _tag(secret: bytes, tenant: str) -> str:
    return pseudonym(secret, "tenant", tenant, letters=TAG_LETTERS)


def _check(secret: bytes, name: str, consent: str) -> str:
    return pseudonym(secret, "minted", name, consent, letters=CHECK_LETTERS)
