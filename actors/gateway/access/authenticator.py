"""Who may come in: keys, scopes, tenants and quotas, and signed tokens for browsers. Pure but for the clock it is given.

Guarantee: the response does not say why a key was refused; the metric does.
"""

import time
from collections.abc import Callable, Mapping

from actors.gateway.access.feedback_token import FeedbackToken, read
from actors.gateway.access.keys import TRAINS, ApiKey, KeyBook, Refused, Scope, Train
from actors.gateway.access.quota import Quotas
from actors.gateway.errors import ApiError
from infra.observe.metrics import Metrics
from schemas.ids import SESSION_LETTERS, group_of, session_of
from schemas.names import consent_of, is_of

BEARER = "bearer "
TOKEN_RPM = 10  # what one browser's token may say a minute, within the quota of the key that asked for it
# What a key must have to open a route. The others know no keys: /healthz is open, a webhook knows its signature.
SCOPE_OF: Mapping[str, Scope] = {
    "/v1/chat/completions": "serve",
    "/v1/completions": "serve",
    "/v1/responses": "serve",
    "/v1/messages": "serve",
    "/v1/messages/count_tokens": "serve",
    "/v1/models": "serve",
    "/v1/models/{model:path}": "serve",
    "/v1/feedback": "feedback",
    "/v1/feedback/tokens": "feedback",
    "/metrics": "admin",
}


class Authenticator:
    """One gateway's entrance. clock: seconds of the epoch."""

    def __init__(self, book: KeyBook, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        self.book = book
        self._metrics = metrics
        self._clock = clock
        self._quotas = Quotas()

    def enter(self, route: str, authorization: str) -> ApiKey:
        """The key of a request to a route, which it opens. Raises ApiError."""
        presented = authorization[len(BEARER) :].strip() if authorization[: len(BEARER)].lower() == BEARER else ""
        try:
            key = self.book.find(presented, self._clock())
        except Refused as refused:
            raise self._refused(refused) from refused
        self._check_scope(key, SCOPE_OF[route])
        return key

    def admit(self, key: ApiKey) -> None:
        """Take one request from the key's quotas. Raises ApiError."""
        self._take(key.id, "requests", key.rpm, 1)
        self._take(key.id, "tokens", key.tpm, 0)

    def charge(self, key: ApiKey, num_tokens: int) -> None:
        """Note the tokens a request used."""
        self._quotas.charge(key.id, "tokens", key.tpm, num_tokens, self._clock())

    def check_answer(self, key: ApiKey, answer: str) -> Train:
        """Whether the answer may be trained on, as the key it was given to says. Raises ApiError unless it was given to the
        key's tenant; of an answer of an old log the key that asks says so.
        """
        try:
            session = session_of(group_of(answer))
        except ValueError as error:
            raise ApiError(400, "answer_id: not the id of an answer", param="answer_id") from error
        train = consent_of(session, self.book.secret, TRAINS)
        made_up = train is None and len(session) == SESSION_LETTERS
        if made_up or not session or not is_of(session, key.tenant, self.book.secret):
            self._metrics.counter("keys_refused", reason="other tenant").inc()
            message = "answer_id: this key's tenant was not given that answer"
            raise ApiError(403, message, kind="permission_error", param="answer_id", code="other_tenant")
        return next((one for one in TRAINS if one == train), key.train)

    def key_of_token(self, token: str, answer: str) -> ApiKey:
        """The key that asked for a browser's token, which may say something of this one answer now. Raises ApiError."""
        claims: FeedbackToken = read(token, self.book.secret, self._clock())
        try:
            key = self.book.live(claims.key, self._clock())
        except Refused as refused:
            raise self._refused(refused) from refused
        self._check_scope(key, SCOPE_OF["/v1/feedback"])
        if answer != claims.answer:
            raise ApiError(403, "the feedback token is for another answer", kind="permission_error", param="answer_id")
        self._take(f"{key.id} {answer}", "requests", TOKEN_RPM, 1)
        return key

    def now_s(self) -> float:
        """The clock."""
        return self._clock()

    def _take(self, name: str, kind: str, per_minute: int, amount: int) -> None:
        wait_s = self._quotas.take(name, kind, per_minute, amount, self._clock())
        if wait_s:
            self._metrics.counter("quota_exceeded", kind=kind).inc()
            message = f"Rate limit reached: {per_minute} {kind} a minute. Try again in {wait_s:.1f} s."
            raise ApiError(429, message, kind=kind, code="rate_limit_exceeded", retry_after_s=wait_s)

    def _check_scope(self, key: ApiKey, scope: Scope) -> None:
        if scope not in key.scopes:
            self._metrics.counter("keys_refused", reason="scope").inc()
            message = f"this key may not do that: it needs the scope {scope}"
            raise ApiError(403, message, kind="permission_error", code="insufficient_scope")

    def _refused(self, refused: Refused) -> ApiError:
        self._metrics.counter("keys_refused", reason=refused.reason).inc()
        if refused.reason == "missing":
            return ApiError(
                401, "no API key: expected Authorization: Bearer hr-…, or x-api-key: hr-…", code="missing_api_key"
            )
        return ApiError(401, "Incorrect API key provided.", code="invalid_api_key")
