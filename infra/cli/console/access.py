"""Sign-in: scopes of viewers, by keys of the app and a signed session cookie.

    a key (or the link that the command prints) ─> POST /enter ─> session cookie ─> the key book is asked at each request

Guarantees: nothing is shown without a valid key, and a revoked key opens nothing RELOAD_S later. After signing out, a copy of
the cookie opens nothing. Only a POST changes anything; it carries a token of its own session and comes from a page of this
console. The link only lets people look. A session belongs to one console and one start of it, since each start signs with a
secret of its own.
"""

import asyncio
import hmac
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import msgspec

from actors.gateway.access.keys import KeyBook, Refused, Scope
from infra.store.store import Store
from schemas.errors import StoreError

RELOAD_S = 5.0
LIVES_S = 12 * 3600  # of a session
MAX_ENDED = 10_000  # sessions that were signed out of; the newest are remembered
LINK = "link"  # the viewer who came by the link that the command prints
LOOKS: frozenset[Scope] = frozenset({"look", "unseal"})

_log = logging.getLogger(__name__)


class Viewer(msgspec.Struct, frozen=True):
    """A signed-in person. name: name in the log, such as console:acme/abcdefghijklmnop. token: secret in every form of the
    session.
    """

    name: str
    scopes: tuple[Scope, ...]
    token: str

    def may(self, scope: Scope) -> bool:
        """True if the key has this scope. Each scope of the console includes look."""
        return scope in self.scopes or (scope == "look" and not LOOKS.isdisjoint(self.scopes))


class Forbidden(Exception):
    """The viewer may not do this, or the request does not come from a page of this console. The message names the cause."""


class ConsoleAccess:
    """Sign-in and sessions of a console. link: a secret that gives read access, "" for none. clock: seconds since 1970."""

    def __init__(self, store: Store, link: str = "", clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._link = link
        self._clock = clock
        self._book = KeyBook()
        self._read_s = -math.inf
        self._turn = asyncio.Lock()
        self._ended: dict[str, None] = {}

    async def refresh(self) -> None:
        """Read the keys again if RELOAD_S have passed. Until that succeeds the known keys stay valid."""
        if self._turn.locked() and self._book.is_read:
            return
        async with self._turn:
            if 0 <= self._clock() - self._read_s < RELOAD_S:  # a clock may be put back
                return
            try:
                await asyncio.to_thread(self._book.refresh, self._store)
            except StoreError as error:
                _log.warning("keys_not_read error=%s", error)
            self._read_s = self._clock()

    def enter(self, presented: str, session: MutableMapping[str, Any]) -> None:
        """Begin a session for a key of the console or for the link. Raises Refused, Forbidden."""
        if self._link and hmac.compare_digest(presented.encode("utf-8", "replace"), self._link.encode()):
            key_id = LINK
        else:
            key = self._book.find(presented, self._clock())
            if LOOKS.isdisjoint(key.scopes):
                raise Forbidden(f"this key has {', '.join(key.scopes)}; the console needs look or unseal")
            key_id = key.id
        session.clear()
        session.update(key=key_id, until=self._clock() + LIVES_S, token=secrets.token_hex(32))

    def viewer(self, session: Mapping[str, Any]) -> Viewer:
        """The viewer of a session, with the scopes that their key has now. Raises Refused."""
        if not session:
            raise Refused("missing")
        token = session["token"]
        if session["until"] < self._clock() or token in self._ended:
            raise Refused("expired")
        if session["key"] == LINK:
            return Viewer(LINK, ("look",), token)
        key = self._book.live(session["key"], self._clock())
        return Viewer(f"console:{key.tenant}/{key.id}", key.scopes, token)

    def leave(self, session: MutableMapping[str, Any]) -> None:
        """End a session: its cookie, and every copy of it, becomes invalid."""
        self._ended[session["token"]] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        session.clear()


def check_form(viewer: Viewer, scope: Scope, form: Mapping[str, str]) -> None:
    """Check that the viewer has the scope and that the form is of their session. Raises Forbidden."""
    if not viewer.may(scope):
        raise Forbidden(f"this needs a key with the scope {scope}: headrace keys create --scope {scope}")
    if not hmac.compare_digest(form.get("token", "").encode("utf-8", "replace"), viewer.token.encode()):
        raise Forbidden("the form belongs to another session: reload the page")


def check_origin(headers: Mapping[str, str], own: str) -> None:
    """Check that a POST comes from a page of the console. own: the origin of its pages, "" for the host in the request.
    Raises Forbidden.
    """
    host, site = headers.get("host", ""), headers.get("sec-fetch-site", "same-origin")
    # Without `own` a proxy that keeps the host may have ended TLS.
    pages = (own,) if own else (f"http://{host}", f"https://{host}")
    if headers.get("origin", "") not in pages or site != "same-origin":
        where = f": open it at {own}" if own else ""
        raise Forbidden(f"the request does not come from a page of the console{where}")
