"""Feedback on answers from /v1/feedback and webhooks, checked and passed to the outbox as received.

Guarantees: a client gets "accepted" once the feedback is in the log or on disk, redacted, with texts sealed
(`infra.store.seal`); a webhook's whole body is sealed if it names an answer, and counted if it does not. A forged webhook is
refused before it is parsed; a repeated webhook is a single record. Feedback is not written for an answer whose key does not
consent to training, nor sealed for an answer that does not exist. Feedback sources interpret the feedback.

A rater is a pseudonym of the name that the key gives, or "key <id>" without a name.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from actors.gateway.access.keys import TRAINS, ApiKey, Train
from actors.gateway.answering.requests import decoded
from actors.gateway.config import Webhook
from actors.gateway.errors import ApiError, bad, unavailable
from actors.gateway.recording.outbox import Outbox, Outgoing
from actors.gateway.recording.record import Recorder
from infra.newest import Newest
from infra.observe.metrics import Metrics
from infra.store.seal import MAX_SESSIONS, Keys, seal_event, seal_text
from schemas import Control, Received
from schemas.ids import ANSWER_PREFIX, belongs_to, fallback_rater, pseudonym, session_consent, sessions_in
from schemas.topics import FEEDBACK

PATH = "/v1/feedback"
WRITTEN = ("label", "text", "correction")  # fields of /v1/feedback that hold texts by people
KEPT_S = 10.0
MAX_TAKEN = 65_536  # webhook events that are known if they come again
CLOCK_S = 300.0  # a signed timestamp may be off by so much
Short = Annotated[str, Meta(min_length=1, max_length=256)]
Long = Annotated[str, Meta(min_length=1, max_length=100_000)]


class FeedbackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v1/feedback.

    answer_id: id in the response. id: id of the feedback, recorded once. choice: index of the answer in a response with
    several. value: 0 to 1, or thumbs as true, false. label: a label of your own. text: the person's text. correction: the
    correct answer. retract: True to withdraw this rater's feedback. kind: kind of the feedback; derived from the other fields
    by default. rater: your name for the rater.
    """

    answer_id: Short
    id: Short | None = None
    choice: Annotated[int, Meta(ge=0, le=1024)] = 0
    value: bool | Annotated[float, Meta(ge=0, le=1)] | None = None
    label: Short | None = None
    text: Long | None = None
    correction: Long | None = None
    retract: bool = False
    kind: Literal["value", "label", "correction", "retraction"] | None = None
    rater: Short | None = None


def read_feedback(body: bytes) -> FeedbackRequest:
    """The feedback in a body; it has exactly one kind. Raises ApiError."""
    request: FeedbackRequest = decoded(body, _feedback, [])
    kinds = [name for name in ("value", "label", "correction") if getattr(request, name) is not None]
    kinds += ["retraction"] if request.retract else []
    if not kinds and request.text is not None and request.kind in (None, "label"):
        kinds = ["label"]
    if len(kinds) != 1:
        raise bad("expected exactly one of value, label, correction, text and retract", "value")
    if request.kind is not None and request.kind != kinds[0]:
        raise bad(f"kind: got {request.kind!r} with a {kinds[0]}", "kind")
    return msgspec.structs.replace(request, kind=kinds[0])


def nth_answer(answer: str, choice: int) -> tuple[str, int]:
    """Id and choice of the answer `choice` places after this one of the same request: its choices are its episodes. Raises
    ApiError.

    >>> nth_answer("hr-mddrffqvmjcncqrrjhvnrntq.7-3.0-0-0", 2)
    ('hr-mddrffqvmjcncqrrjhvnrntq.7-3.0-2-0', 2)
    """
    head, _, tail = answer.rpartition(".")
    try:
        attempt, episode, part = tail.split("-")
        choice += int(episode)
        return f"{head}.{attempt}-{choice}-{part}", choice
    except ValueError as error:
        raise bad("answer_id: not the id of an answer", "answer_id") from error


def check_signature(webhook: Webhook, headers: Mapping[str, str], body: bytes, now_s: float) -> None:
    """Raises ApiError unless the body carries the webhook's HMAC-SHA256, in hexadecimal or base64.

    With a timestamp header the signature covers timestamp + body, and old timestamps are refused, since they may be replayed.
    """
    signed = body
    if webhook.timestamp_header:
        stamp = headers.get(webhook.timestamp_header, "")
        if not abs(_seconds(stamp) - now_s) <= CLOCK_S:  # so said, a stamp that is not a number is refused too
            raise ApiError(401, f"{webhook.timestamp_header}: not within {CLOCK_S:g} s of now", code="stale_signature")
        signed = stamp.encode() + body
    expected = hmac.new(webhook.secret, signed, hashlib.sha256).digest()
    given = headers.get(webhook.header, "").removeprefix("sha256=").strip()
    if not any(hmac.compare_digest(expected, digest) for digest in _digests(given)):
        raise ApiError(401, f"{webhook.header}: not the signature of this body", code="invalid_signature")


class FeedbackIntake:
    """Takes feedback in. secret: key for names, b"" before it is known. may_record: whether feedback on answers to a key with
    this `--train` may be written.
    """

    def __init__(
        self,
        recorder: Recorder,
        outbox: Outbox,
        metrics: Metrics,
        keys: Keys,
        *,
        secret: Callable[[], bytes],
        may_record: Callable[[Train], bool],
    ) -> None:
        self._keys = keys
        self._recorder = recorder
        self._outbox = outbox
        self._metrics = metrics
        self._secret = secret
        self._may_record = may_record
        self._taken: Newest[str, None] = Newest(MAX_TAKEN)
        self.is_read = True  # by a source of the settings

    async def feedback(self, request: FeedbackRequest, *, answer: str, key: ApiKey) -> str:
        """Hand on the feedback on one answer; returns the feedback's id. Raises ApiError."""
        secret, rater, identity = self._secret(), fallback_rater(key.id), secrets.token_hex(12)
        if request.rater:
            rater = pseudonym(secret, "rater", key.tenant, request.rater)
        if request.id:
            identity = pseudonym(secret, "feedback", key.tenant, "", request.id)
        table = msgspec.to_builtins(request) | {"rater": rater, "id": identity}
        given = {name: value for name, value in table.items() if value is not None}
        feedback: Any = await self._recorder.masked(given)
        del feedback["choice"]
        # A custom pattern may take them for something else.
        feedback |= {"answer_id": answer, "rater": rater, "id": identity}
        written = [name for name in WRITTEN if isinstance(feedback.get(name), str)]
        received = Received(
            path=PATH, body=msgspec.json.encode(feedback), id=identity, ref=answer, tenant=key.tenant, rater=rater
        )
        await self._hand_on(received, (lambda: self._sealed(feedback, written, answer)) if written else None)
        return identity

    async def webhook(self, webhook: Webhook, body: bytes) -> None:
        """Hand on the body of a webhook. Raises ApiError."""
        try:
            value = msgspec.json.decode(body)
            masked = msgspec.json.encode(await self._recorder.masked(value))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad(f"the body is not valid JSON, or too deep: {error}") from error
        if not self._secret():
            raise unavailable(
                "the gateway cannot identify the named answers while the object store is unreachable; send it again"
            )
        identity = hmac.new(webhook.secret, b"event\x00" + body, hashlib.sha256).hexdigest()[:24]
        if identity in self._taken:
            self._metrics.counter("feedback_received", path=webhook.path, outcome="repeated").inc()
            return
        sessions, consented = self._named_in(webhook, msgspec.json.encode(value).decode())  # masked, an id may be gone
        if not consented:
            self._metrics.counter("feedback_received", path=webhook.path, outcome="no consent").inc()
            return
        if not sessions:
            self._metrics.counter("feedback_unsealed", path=webhook.path).inc()
        received = Received(path=webhook.path, body=masked, id=identity)
        await self._hand_on(received, (lambda: seal_event(masked, self._keys, sessions)) if sessions else None)
        self._taken.put(identity, None)

    def _named_in(self, webhook: Webhook, text: str) -> tuple[list[str], bool]:
        """Sessions whose answers a webhook names, and True if all allow recording. Raises ApiError."""
        found, consented = [], True
        # A source may undo a sender's changes of an id: other case, percent-encoding, blanks.
        plain = "".join(unquote(text).lower().split())
        for session in dict.fromkeys((*sessions_in(text), *sessions_in(plain))):
            train = session_consent(session, self._secret(), TRAINS)
            if train is None:
                continue
            if webhook.tenant and not belongs_to(session, webhook.tenant, self._secret()):
                message = f"the body names an answer that tenant {webhook.tenant!r} was not given"
                raise ApiError(403, message, kind="permission_error", code="other_tenant")
            found.append(session)
            consented = consented and self._may_record(next(known for known in TRAINS if known == train))
        if len(found) > MAX_SESSIONS:
            raise bad(f"the body names answers of {len(found)} sessions, expected at most {MAX_SESSIONS}: split it")
        return found, consented

    async def _hand_on(self, received: Received, seal: Callable[[], bytes] | None) -> None:
        """Write it, its body sealed. seal: raises StoreError; then nothing is written, and the sender gets an error."""

        async def prepare() -> Control:
            if seal is None:
                return received
            return msgspec.structs.replace(received, body=await asyncio.to_thread(seal))

        path = received.path
        kept: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._outbox.offer(Outgoing(FEEDBACK, prepare, len(received.body), kept))
        try:
            async with asyncio.timeout(KEPT_S):
                stored = await kept
        except TimeoutError:
            stored = False
        self._metrics.counter("feedback_received", path=path, outcome="kept" if stored else "refused").inc()
        if not stored:
            raise unavailable("the feedback could not be kept; send it again")

    def _sealed(self, feedback: dict[str, Any], written: Sequence[str], ref: str) -> bytes:
        answer = ref.removeprefix(ANSWER_PREFIX)
        texts = {name: seal_text(feedback[name], self._keys, answer) for name in written}
        return msgspec.json.encode({**feedback, **texts})


_feedback = msgspec.json.Decoder(FeedbackRequest)


def _seconds(stamp: str) -> float:
    """Seconds of the epoch in a header: a number, or ISO 8601; minus infinity for neither."""
    with suppress(ValueError):
        return float(stamp)
    with suppress(ValueError):
        return datetime.fromisoformat(stamp).timestamp()
    return float("-inf")


def _digests(text: str) -> list[bytes]:
    found = []
    with suppress(ValueError):
        found.append(bytes.fromhex(text))
    with suppress(binascii.Error, ValueError):
        found.append(base64.b64decode(text, validate=True))
    return found
