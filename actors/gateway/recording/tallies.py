"""Counts of this gateway's answers by version, for the gate, without any text.

It also counts the sessions of each tenant, and the sessions with a failure or refusal: prompts can provoke refusals, and
requests of a single client must not look like many clients. Bounded: `MAX_VERSIONS` versions, `MAX_CLIENTS` named tenants of
each (the rest are pooled), and `MAX_SEEN` counted sessions of these versions.
"""

from collections.abc import Sequence

import msgspec

from actors.config import joined_patterns
from schemas import Answered, Client

MAX_VERSIONS = 32
MAX_CLIENTS = 63
TOLD_CLIENTS = 4  # versions whose clients a report names: the versions with the newest answers
MAX_SEEN = 50_000
OPENING_CHARS = 200  # a refusal is one at the beginning of an answer


class Tallies:
    """Counts by version and trial, of the versions with the newest answers. refusals: regular expressions.

    client: a tenant, as ids name it. session: or user, or the request itself where it names neither.
    """

    def __init__(self, refusals: Sequence[str]) -> None:
        self._refusal = joined_patterns(refusals) if refusals else None
        self._known: dict[tuple[int, int], Answered] = {}
        self._clients: dict[tuple[int, int], dict[str, Client]] = {}
        self._seen: dict[
            tuple[int, int], dict[tuple[str, str], tuple[bool, bool]]
        ] = {}  # of each version, in order of arrival
        self.num_seen = 0  # sessions remembered

    def answered(self, version: int, trial: int, texts: Sequence[str], client: str, session: str) -> None:
        """Answers that came to their end."""
        refused = [bool(self._refusal and self._refusal.search(text[:OPENING_CHARS])) for text in texts]
        self._add(Answered(version=version, trial=trial, answers=len(texts), refused=sum(refused)), client, session)

    def failed(self, version: int, trial: int, count: int, client: str, session: str) -> None:
        """Answers that the engine did not bring to their end."""
        self._add(Answered(version=version, trial=trial, answers=count, failed=count), client, session)

    def report(self) -> tuple[Answered, ...]:
        lately = list(self._clients)[-TOLD_CLIENTS:]
        return tuple(
            msgspec.structs.replace(answered, clients=tuple(self._clients[place].values()))
            if place in lately
            else answered
            for place, answered in self._known.items()
        )

    def _add(self, more: Answered, client: str, session: str) -> None:
        place = (more.version, more.trial)
        known = self._known.get(place, Answered(version=more.version, trial=more.trial))
        self._known[place] = msgspec.structs.replace(
            known,
            answers=known.answers + more.answers,
            failed=known.failed + more.failed,
            refused=known.refused + more.refused,
        )
        self._count(place, more, client, session)
        if len(self._known) > MAX_VERSIONS:
            oldest = next(iter(self._clients))  # a lower version may serve again
            del self._known[oldest], self._clients[oldest]
            self.num_seen -= len(self._seen.pop(oldest))

    def _count(self, place: tuple[int, int], more: Answered, client: str, session: str) -> None:
        """Count a session once for its client, once as failed, and once as refused."""
        clients = self._clients[place] = self._clients.pop(place, {})  # the last to have answered
        asked = self._seen.setdefault(place, {})
        seen = asked.get((client, session))
        was_failed, was_refused = seen or (False, False)
        failed, refused = was_failed or more.failed > 0, was_refused or more.refused > 0
        asked[client, session] = failed, refused
        self.num_seen += seen is None
        if self.num_seen > MAX_SEEN:
            longest_ago = next(sessions for sessions in self._seen.values() if sessions)
            del longest_ago[next(iter(longest_ago))]
            self.num_seen -= 1
        name = client if client in clients or len(clients) < MAX_CLIENTS else ""
        known = clients.get(name, Client(client=name))
        clients[name] = Client(
            client=name,
            sessions=known.sessions + (seen is None),
            failed=known.failed + (failed and not was_failed),
            refused=known.refused + (refused and not was_refused),
        )
