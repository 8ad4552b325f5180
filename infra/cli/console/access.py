"""Who may look and who may act: keys of the app, a cookie for as long as the browser looks, and where a form may come from.

    a key (or the link the command prints) ─> POST /enter ─> cookie, signed by this process ─> asked of the keys at each request

Guarantees: nothing is shown without a valid key, and a revoked key opens nothing RELOAD_S later. After signing out the cookie
of the session opens nothing, whoever has it. Only a POST changes anything; it carries a token of its own session and comes
from a page of this console. The link only lets people look.

A session belongs to one console and one start of it, since each signs with a secret of its own: another console of the app, and
the same one after a restart, ask for the key again. So ended sessions need not be written anywhere.
"""

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping

import msgspec

from actors.gateway.access.keys import KeyBook, Refused, Scope
from infra.cli.look.console_bounds import LIVES_S, MAX_ENDED
from infra.store.store import Store
from schemas.errors import StoreError

RELOAD_S = 5.0
LINK = "link"  # who looks through the link that the command prints
LOOKS: frozenset[Scope] = frozenset({"look", "operate", "unseal"})

_log = logging.getLogger(__name__)


class Viewer(msgspec.Struct, frozen=True):
    """Who looks, and what they may do. name: as it is written in the log. session: random, of one sign-in; the token in
    their forms is made from it. until_s: when the cookie expires, seconds of the epoch. scopes: of their key.

    Example: Viewer(name="console:acme/abcdefghijklmnop", scopes=("look",), session="4f…", until_s=1.8e9)
    """

    name: str
    scopes: tuple[Scope, ...]
    session: str
    until_s: float

    def may(self, scope: Scope) -> bool:
        """Whether the key has this scope. Each scope of the console includes look."""
        return scope in self.scopes or (scope == "look" and not LOOKS.isdisjoint(self.scopes))


class Forbidden(Exception):
    """The viewer may not do this, or the request does not come from a page of this console. The message says which."""


class _Cookie(msgspec.Struct, frozen=True, array_like=True):
    """What a cookie holds."""

    key_id: str
    until_s: float
    session: str


class ConsoleAccess:
    """Sign-in and sessions of one console. link: a secret that lets its holder look, "" for none. clock: seconds of the epoch.
    max_ended: how many ended sessions are remembered.
    """

    def __init__(
        self, store: Store, link: str = "", clock: Callable[[], float] = time.time, max_ended: int = MAX_ENDED
    ) -> None:
        self._store = store
        self._link = link
        self._clock = clock
        self._book = KeyBook()
        self._read_s = -math.inf
        self._secret = secrets.token_bytes(32)
        self._max_ended = max_ended
        self._ended: dict[str, float] = {}  # session → when its cookie expires
        self._turn = asyncio.Lock()

    async def refresh(self) -> None:
        """Read the keys again if RELOAD_S have passed. Until that succeeds the known keys hold."""
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

    def enter(self, presented: str) -> str:
        """Return a cookie for a key of the console or for the link. Raises Refused, Forbidden."""
        if self._link and hmac.compare_digest(presented.encode("utf-8", "replace"), self._link.encode()):
            key_id = LINK
        else:
            key = self._book.find(presented, self._clock())
            if LOOKS.isdisjoint(key.scopes):
                raise Forbidden(f"this key has {', '.join(key.scopes)}; the console needs look, operate or unseal")
            key_id = key.id
        held = msgspec.json.encode(_Cookie(key_id, self._clock() + LIVES_S, secrets.token_hex(16)))
        return f"{held.hex()}.{self._mac(held)}"

    def viewer(self, cookie: str) -> Viewer:
        """The viewer of a cookie, with the scopes that their key has now. Raises Refused."""
        text, _, mac = cookie.partition(".")
        if not text:
            raise Refused("missing")
        try:
            body = bytes.fromhex(text)
        except ValueError as error:
            raise Refused("wrong") from error
        if not hmac.compare_digest(mac.encode(), self._mac(body).encode()):
            raise Refused("wrong")
        held = msgspec.json.decode(body, type=_Cookie)
        if held.until_s < self._clock() or held.session in self._ended:
            raise Refused("expired")
        if held.key_id == LINK:
            return Viewer(LINK, ("look",), held.session, held.until_s)
        key = self._book.live(held.key_id, self._clock())
        return Viewer(f"console:{key.tenant}/{key.id}", key.scopes, held.session, held.until_s)

    def leave(self, viewer: Viewer) -> None:
        """End a session: its cookie opens nothing more. Where more than `max_ended` would be remembered, every session ends."""
        now_s = self._clock()
        self._ended = {session: until_s for session, until_s in self._ended.items() if until_s >= now_s}
        if len(self._ended) < self._max_ended:
            self._ended[viewer.session] = viewer.until_s
            return
        _log.warning("sessions_ended count=%d", len(self._ended))
        self._secret = secrets.token_bytes(32)
        self._ended = {}

    @property
    def num_ended(self) -> int:
        """How many ended sessions are remembered."""
        return len(self._ended)

    def form_token(self, viewer: Viewer) -> str:
        """The token that every form of this viewer carries."""
        return self._mac(f"form {viewer.session}".encode())

    def check_form(self, viewer: Viewer, scope: Scope, form: Mapping[str, str]) -> None:
        """Check that the viewer has the scope and that the form is of their session. Raises Forbidden."""
        if not viewer.may(scope):
            raise Forbidden(f"this needs a key with the scope {scope}: headrace keys create --scope {scope}")
        if not hmac.compare_digest(form.get("token", "").encode("utf-8", "replace"), self.form_token(viewer).encode()):
            raise Forbidden("the form is of another session: open the page again")

    def _mac(self, body: bytes) -> str:
        return hmac.new(self._secret, body, hashlib.sha256).hexdigest()


def check_origin(headers: Mapping[str, str], own: str) -> None:
    """Check that a POST comes from a page of the console. own: the origin of its pages, "" for the host in the request.
    Raises Forbidden.
    """
    host, site = headers.get("host", ""), headers.get("sec-fetch-site", "same-origin")
    # Without `own` a proxy that keeps the host may have ended TLS.
    pages = (own,) if own else (f"http://{host}", f"https://{host}")
    if headers.get("origin", "") not in pages or site != "same-origin":
        where = f": open it at {own}" if own else ""
        raise Forbidden(f"this came from another page than the console's{where}")
