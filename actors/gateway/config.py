"""Settings of the gateway: the [gateway] table of the TOML. Its presence makes `headrace up` serve."""

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from actors.config import REFUSALS, Share, check_patterns
from infra.chain.redact import KINDS, Kind
from infra.settings.config import NonNegative, Positive, Seconds, Section, Use, split_address
from infra.settings.outside import checked_url, without_secrets
from schemas.fields import Channel

TrainOn = Literal["nothing", "consented", "all"]


class GatewayLimits(Section, frozen=True):
    """[gateway.limits]: what one request may ask for; more is refused with 400, 413 or 429.

    body_bytes: of a request. prompt_tokens, messages: of a conversation; one with more than 16 characters for each of its
    tokens is refused before they are counted. images: pictures of a conversation. pixels: of all its pictures. tools:
    functions a request may name. max_tokens: of an answer, also where a request names more or none (less where the engine's
    sequences are shorter). choices: n. stops: stop strings. concurrency: answers made at once, those of a canary included,
    an eighth of them for keys that hold few; more are refused with 429. body_s: seconds that a client may take for a head,
    for a body, between two requests, and to read more of an answer; then its connection is closed.

    Example: GatewayLimits(max_tokens=2048, concurrency=512)
    """

    body_bytes: Positive = 1024 * 1024
    prompt_tokens: Positive = 32_768
    messages: Positive = 1024
    images: Positive = 8
    pixels: Positive = 4_194_304
    tools: Positive = 128
    max_tokens: Positive = 1024
    choices: Positive = 8
    stops: Positive = 16
    concurrency: Positive = 256
    body_s: Seconds = 30.0


class RedactRules(Section, frozen=True):
    """[gateway.redact]: what is taken out before anything is written. On by default.

    on: whether anything is looked for. kinds: built-in patterns. patterns: your own, name to regular expression.
    action: mask writes `[email]` instead of what was found, and the tokens of the masked text, which then have no
    ratio; drop writes nothing. images: pictures are not searched for personal data, so answers to requests with
    pictures are not written, unless it is "keep". Those of named users are never written: a picture is not sealed, so
    it could not be forgotten.

    Example: RedactRules(patterns={"ticket": "T-[0-9]+"})
    """

    on: bool = True
    kinds: tuple[Kind, ...] = KINDS
    patterns: dict[str, str] = msgspec.field(default_factory=dict)
    action: Literal["mask", "drop"] = "mask"
    images: Literal["drop", "keep"] = "drop"


class CanaryShare(Section, frozen=True):
    """[gateway.canary]: a second gateway (`headrace serve --channel canary`) that answers a share of the sessions.

    url: where this gateway reaches it. share: of the sessions; one stays where it fell. A request without a session goes by
    its user, one without either by itself. listen: host:port of the canary; that of `url` where left out. While it is
    away, broken or silent, this gateway answers. Both need the same object store, for the keys.

    Example: CanaryShare(url="http://127.0.0.1:8010", share=0.1)
    """

    url: str
    share: Share = 0.1
    listen: str = ""

    def __post_init__(self) -> None:
        parts = urlsplit(checked_url(self.url))
        if parts.path.strip("/") or parts.query:
            raise ValueError(f'got url = "{without_secrets(self.url)}", expected one such as "http://127.0.0.1:8010"')
        split_address(self.address)

    @property
    def address(self) -> str:
        """Where the canary listens, host:port."""
        parts = urlsplit(self.url)
        return self.listen or f"{parts.hostname}:{parts.port or 80}"


class TracesConfig(Section, frozen=True):
    """[gateway.traces]: a span for each answer, by OpenTelemetry's semantic conventions for generative AI. It says nothing of
    what was asked or answered.

    endpoint: of a collector that takes OTLP over HTTP. Headers, with keys, and certificates are those of OpenTelemetry's own
    variables, such as OTEL_EXPORTER_OTLP_HEADERS. service: service.name. queue: spans that wait at most; more are
    dropped and counted.

    Example: TracesConfig(endpoint="http://127.0.0.1:4318/v1/traces")
    """

    endpoint: str
    service: str = "headrace"
    queue: Positive = 4096

    def __post_init__(self) -> None:
        checked_url(self.endpoint)


class GatewayConfig(Section, frozen=True):
    """[gateway]: an OpenAI-compatible server in front of an engine.

    listen: host:port. train_on: whose answers are written to the log: nothing, those of keys made with `--train yes`,
    or all but those of keys made with `--train no`. channel: stable is moved by the gate (the newest version while
    nothing was ever promoted), canary is what is on trial, and the stable version without a trial, candidate is every
    version. engine: instead of [engine]. models: names a request may use, any where empty. processor: custom
    redaction, run before the first write. queue_records, queue_mb: answers that wait for the broker in memory. spool:
    folder of what waits on disk while it is away. spool_mb: at most; beyond it answers are shed and counted. send_s: a
    broker that takes longer is away. sessions: conversations remembered, to go on with their very tokens; as many that
    clients go on with by the id of an answer. sessions_mb: of memory, for all of either. cors_origins: pages that may
    send feedback. canary: who answers a share of the sessions. traces: where spans of answers go. refusals: regular
    expressions of what an answer begins with that refuses; such answers are counted for the gate. keys_reload_s: how
    soon a new key works and a revoked one stops working. report_s: seconds from one report to the log to the next.
    drain_s: at a stop, for running requests. strict: refuses requests with fields that are unknown, or cannot be served, or
    change the policy's distribution; by default such fields are ignored or served, and named in response headers.

    Example: GatewayConfig(listen="0.0.0.0:8000", train_on="consented")
    """

    listen: str = "127.0.0.1:8000"
    train_on: TrainOn = "nothing"
    channel: Channel = "stable"
    engine: Use | None = None
    models: tuple[str, ...] = ()
    limits: GatewayLimits = GatewayLimits()
    redact: RedactRules = RedactRules()
    processor: tuple[Use, ...] = ()
    queue_records: Positive = 4096
    queue_mb: Positive = 64
    spool: str = "spool"
    spool_mb: NonNegative = 1024
    send_s: Seconds = 2.0
    sessions: Positive = 4096
    sessions_mb: Positive = 256
    cors_origins: tuple[str, ...] = ()
    canary: CanaryShare | None = None
    traces: TracesConfig | None = None
    refusals: tuple[str, ...] = REFUSALS
    keys_reload_s: Seconds = 2.0
    report_s: Seconds = 2.0
    drain_s: Seconds = 10.0
    strict: bool = False

    def __post_init__(self) -> None:
        split_address(self.listen)
        check_patterns("refusals", self.refusals)

    def as_canary(self) -> "GatewayConfig":
        """The settings of the canary beside a gateway with these."""
        listen = self.listen if self.canary is None else self.canary.address
        return msgspec.structs.replace(self, channel="canary", listen=listen, canary=None)


class Webhook(msgspec.Struct, frozen=True):
    """A path that takes feedback from outside. secret: of its signature. header: where that is.

    timestamp_header: part of what is signed, "" for none. tenant: whose answers alone it may speak of, "" for those of
    all. path: where it is posted to.

    Example: Webhook(path="/zendesk", secret=b"…", header="x-signature")
    """

    path: str
    secret: bytes
    header: str
    timestamp_header: str = ""
    tenant: str = ""
