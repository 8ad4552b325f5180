"""Who may come in: keys, scopes, tenants and quotas, and signed tokens for browsers. Pure but for the clock it is given.

Guarantee: what a client is told does not say why its key is none; the metric does.
"""

import time
from collections.abc import Callable

from actors.gateway.errors import ApiError
from actors.gateway.grant import Grant, read
from actors.gateway.keys import Key, KeyBook, Refused, Scope
from actors.gateway.quota import Quotas
from infra.metrics import Metrics
from schemas.ids import is_of_tenant

BEARER = "bearer "


class Door:
    """One gateway's entrance. clock: seconds of the epoch."""

    def __init__(self, book: KeyBook, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        self.book = book
        self._metrics = metrics
        self._clock = clock
        self._quotas = Quotas()

    def enter(self, authorization: str, *scopes: Scope) -> Key:
        """The key of a request that may do one of `scopes`. Raises ApiError."""
        presented = authorization[len(BEARER) :].strip() if authorization[: len(BEARER)].lower() == BEARER else ""
        try:
            key = self.book.find(presented, self._clock())
        except Refused as refused:
            raise self._refused(refused) from refused
        if not set(scopes) & set(key.scopes):
            self._metrics.counter("keys_refused", reason="scope").inc()
            message = f"this key may not do that: it needs the scope {' or '.join(scopes)}"
            raise ApiError(403, message, kind="permission_error", code="insufficient_scope")
        return key

    def admit(self, key: Key) -> None:
        """Take one request from the key's quotas. Raises ApiError."""
        now_s = self._clock()
        for kind, per_minute in (("requests", key.rpm), ("tokens", key.tpm)):
            wait_s = self._quotas.take(key.id, kind, per_minute, 1 if kind == "requests" else 0, now_s)
            if wait_s:
                self._metrics.counter("quota_exceeded", kind=kind).inc()
                message = f"Rate limit reached: {per_minute} {kind} a minute. Try again in {wait_s:.1f} s."
                raise ApiError(429, message, kind=kind, code="rate_limit_exceeded", retry_after_s=wait_s)

    def charge(self, key: Key, num_tokens: int) -> None:
        """Note the tokens a request used."""
        self._quotas.charge(key.id, "tokens", key.tpm, num_tokens, self._clock())

    def check_answer(self, key: Key, answer: str) -> None:
        """Raises ApiError unless the answer was given to the key's tenant."""
        try:
            own = is_of_tenant(answer, key.tenant)
        except ValueError as error:
            raise ApiError(400, "answer_id: not the id of an answer", param="answer_id") from error
        if not own:
            self._metrics.counter("keys_refused", reason="other tenant").inc()
            message = "answer_id: this key's tenant was not given that answer"
            raise ApiError(403, message, kind="permission_error", param="answer_id", code="other_tenant")

    def granted(self, token: str, answer: str) -> tuple[Grant, Key]:
        """What a browser's token allows, and the key that asked for it. Raises ApiError."""
        grant = read(token, self.book.secret, self._clock())
        try:
            key = self.book.live(grant.key, self._clock())
        except Refused as refused:
            raise self._refused(refused) from refused
        if answer != grant.answer:
            raise ApiError(403, "the feedback token is for another answer", kind="permission_error", param="answer_id")
        return grant, key

    def now_s(self) -> float:
        """The clock."""
        return self._clock()

    def _refused(self, refused: Refused) -> ApiError:
        self._metrics.counter("keys_refused", reason=refused.reason).inc()
        if refused.reason == "missing":
            return ApiError(401, "no API key: expected Authorization: Bearer hr-…", code="missing_api_key")
        return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
