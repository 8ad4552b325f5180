"""Access to the gateway: keys, scopes, tenants and quotas. Pure but for the clock it is given.

Guarantee: the response does not say why a key was refused; the metric does.
"""

import time
from collections.abc import Callable

import msgspec

from actors.gateway.access.keys import TRAINS, ApiKey, KeyBook, Refused, Scope, Train
from actors.gateway.errors import ApiError
from infra.newest import Newest
from infra.observe.metrics import Metrics
from schemas.ids import belongs_to, group_of, session_consent, session_of

BEARER = "bearer "
MINUTE_S = 60.0
MAX_BUCKETS = 65_536  # of those used longest ago some are forgotten: they are full again


class Bucket(msgspec.Struct):
    """A quota: a bucket that holds a minute's worth and fills evenly.

    The tokens of an answer are known only afterwards, so `left` may fall below zero; the next request waits until it is above.
    per_minute: size of the bucket. left: rest at that time. at_s: time of the last change, by the caller's clock.
    """

    per_minute: float
    left: float
    at_s: float

    def take(self, amount: float, now_s: float) -> float:
        """Take an amount at once; where there is not enough, take nothing and return the seconds until there is."""
        self.charge(0, now_s)
        needed = min(amount, self.per_minute)
        if self.left < needed:
            return (needed - self.left) * MINUTE_S / self.per_minute
        self.left -= amount
        return 0.0

    def charge(self, amount: float, now_s: float) -> None:
        """Charge an amount that is used already, even beyond the quota."""
        passed_s = max(0.0, now_s - self.at_s)  # a clock that is set back takes nothing away
        self.left = min(self.per_minute, self.left + passed_s * self.per_minute / MINUTE_S) - amount
        self.at_s = now_s


class Authenticator:
    """Authenticates keys, and enforces their scopes and quotas. clock: seconds of the epoch."""

    def __init__(self, book: KeyBook, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        self.book = book
        self._metrics = metrics
        self.now_s = clock
        self._buckets: Newest[tuple[str, str], Bucket] = Newest(MAX_BUCKETS)

    def enter(self, scope: Scope, authorization: str) -> ApiKey:
        """The key of a request, which has the scope of its route. Raises ApiError."""
        presented = authorization[len(BEARER) :].strip() if authorization[: len(BEARER)].lower() == BEARER else ""
        try:
            key = self.book.find(presented, self.now_s())
        except Refused as refused:
            raise self._refused(refused) from refused
        if scope not in key.scopes:
            self._metrics.counter("keys_refused", reason="scope").inc()
            message = f"this key may not do that: it needs the scope {scope}"
            raise ApiError(403, message, kind="permission_error", code="insufficient_scope")
        return key

    def admit(self, key: ApiKey, count: int = 1) -> None:
        """Charge `count` requests to the key's quotas; a request for `n` answers counts n. Raises ApiError."""
        self._take(key.id, "requests", key.rpm, count)
        self._take(key.id, "tokens", key.tpm, 0)

    def check_live(self, key: ApiKey) -> None:
        """Raise ApiError if the key was revoked, or expired, since it was presented."""
        try:
            self.book.live(key.id, self.now_s())
        except Refused as refused:
            raise self._refused(refused) from refused

    def charge(self, key: ApiKey, num_tokens: int) -> None:
        """Note the tokens a request used."""
        if key.tpm:
            self._bucket(key.id, "tokens", key.tpm).charge(num_tokens, self.now_s())

    def check_answer(self, key: ApiKey, answer: str) -> Train:
        """Return the `--train` of the key that an answer was given to.

        Raises ApiError unless the answer was given to the key's tenant.
        """
        try:
            session = session_of(group_of(answer))
        except ValueError as error:
            raise ApiError(400, "answer_id: not the id of an answer", param="answer_id") from error
        train = session_consent(session, self.book.secret, TRAINS)
        if train is None or not belongs_to(session, key.tenant, self.book.secret):
            self._metrics.counter("keys_refused", reason="other tenant").inc()
            message = "answer_id: this key's tenant was not given that answer"
            raise ApiError(403, message, kind="permission_error", param="answer_id", code="other_tenant")
        return next(known for known in TRAINS if known == train)

    def _take(self, name: str, kind: str, per_minute: int, amount: int) -> None:
        wait_s = self._bucket(name, kind, per_minute).take(amount, self.now_s()) if per_minute else 0.0
        if wait_s:
            self._metrics.counter("quota_exceeded", kind=kind).inc()
            message = f"Rate limit reached: {per_minute} {kind} a minute. Try again in {wait_s:.1f} s."
            raise ApiError(429, message, kind=kind, code="rate_limit_exceeded", retry_after_s=wait_s)

    def _bucket(self, name: str, kind: str, per_minute: int) -> Bucket:
        bucket = self._buckets.get((name, kind))
        if bucket is None:
            bucket = Bucket(per_minute, per_minute, self.now_s())
            self._buckets.put((name, kind), bucket)
        return bucket

    def _refused(self, refused: Refused) -> ApiError:
        self._metrics.counter("keys_refused", reason=refused.reason).inc()
        if refused.reason == "missing":
            return ApiError(
                401, "no API key: expected Authorization: Bearer hr-…, or x-api-key: hr-…", code="missing_api_key"
            )
        return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
