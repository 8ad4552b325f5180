"""Whose a turn is: a session stays that of the user it named, whether later turns name them or not.

Guarantee: a turn that names no user, of a session that named one here, is sealed under that user's key. Where this gateway
does not know the session (another served it, or it was long ago) and the turn brings a history, it is sealed under a key of
the session itself, which is destroyed with the keys of the user that the session named (`infra.ledger.forget`). Bounded, in
memory.
"""

from collections import OrderedDict

MAX_SESSIONS = 65_536


class Users:
    """Users of the newest sessions."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._known: OrderedDict[str, str] = OrderedDict()

    def subject(self, session: str, named: str, *, goes_on: bool) -> str:
        """The user whose key a turn is sealed under, "" for none. session: "" for none. named: its user, "" for none.

        goes_on: it brings answers that were given before.
        """
        if not session:
            return named
        subject = named or self._known.get(session, session if goes_on else "")
        self._known[session] = subject
        self._known.move_to_end(session)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)
        return subject
