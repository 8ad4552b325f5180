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
    """[gateway.limits]: bounds of one request; more is refused with status 400, 413 or 429.

    Example: GatewayLimits(max_tokens=2048, concurrency=512)
    """

    body_bytes: Positive = 1024 * 1024
    """Bytes of a request's body. A key, or a webhook's address, holds at most 8 times as many in unfinished bodies."""
    prompt_tokens: Positive = 32_768
    """Tokens of a conversation. A prompt of more than 16 characters for each of them is refused before it is tokenized."""
    messages: Positive = 1024
    """Messages of a conversation."""
    images: Positive = 8
    """Pictures of a conversation."""
    pixels: Positive = 4_194_304
    """Pixels of all pictures of a request. Pictures made to be slow take up to 0.2 s of a processor for the default, in a
    thread of their own, a request at a time; each answer that runs holds 3 bytes for each of its pixels."""
    tools: Positive = 128
    """Functions that a request may name."""
    max_tokens: Positive = 1024
    """Tokens of an answer, also where a request names more or none; fewer where the engine's sequences are shorter."""
    choices: Positive = 8
    """Answers of a request, its `n`."""
    stops: Positive = 16
    """Stop strings of a request."""
    concurrency: Positive = 256
    """Answers made at once, those of a canary included. An eighth is kept for keys that hold few."""
    body_s: Seconds = 30.0
    """Seconds that a client may take for a head, for a body, between two requests, and to read more of an answer; then its
    connection is closed."""


class RedactRules(Section, frozen=True):
    """[gateway.redact]: removal of secrets and personal data before anything is written.

    Example: RedactRules(patterns={"ticket": "T-[0-9]+"})
    """

    on: bool = True
    """Whether texts are searched."""
    kinds: tuple[Kind, ...] = KINDS
    """Built-in patterns. All by default."""
    patterns: dict[str, str] = msgspec.field(default_factory=dict)
    """Patterns of your own: name to regular expression."""
    action: Literal["mask", "drop"] = "mask"
    """Action where something is found. "mask" writes `[email]` in its place, and the tokens of the masked text, which then have
    no ratio; "drop" writes nothing of the answer."""
    images: Literal["drop", "keep"] = "drop"
    """Action for answers to requests with pictures, which are not searched. "drop" writes nothing of them; "keep" writes
    them, but never those of named users: a picture is not sealed, so it could not be forgotten."""


class CanaryShare(Section, frozen=True):
    """[gateway.canary]: a second gateway (`headrace serve --channel canary`) that answers a share of the sessions. This gateway
    answers while that one is away, broken or silent. Both need the same object store, for the keys.

    Example: CanaryShare(url="http://127.0.0.1:8010", share=0.1)
    """

    url: str
    """Address where this gateway reaches the canary."""
    share: Share = 0.1
    """Share of the sessions, from 0 to 1. A session stays where it fell; a request without one is drawn by its user, and
    without either by itself."""
    listen: str = ""
    """Address where the canary listens, host:port. That of `url` by default."""

    def __post_init__(self) -> None:
        parts = urlsplit(checked_url(self.url))
        if parts.path.strip("/") or parts.query:
            raise ValueError(f'got url = "{without_secrets(self.url)}", expected one such as "http://127.0.0.1:8010"')
        split_address(self.address)

    @property
    def address(self) -> str:
        """Address where the canary listens, host:port."""
        parts = urlsplit(self.url)
        return self.listen or f"{parts.hostname}:{parts.port or 80}"


class TracesConfig(Section, frozen=True):
    """[gateway.traces]: a span for each answer, by OpenTelemetry's semantic conventions for generative AI, without a word of
    prompts or answers. Headers, with keys, and certificates come from OpenTelemetry's own variables, such as
    OTEL_EXPORTER_OTLP_HEADERS.

    Example: TracesConfig(endpoint="http://127.0.0.1:4318/v1/traces")
    """

    endpoint: str
    """URL of a collector that takes OTLP over HTTP."""
    service: str = "headrace"
    """Value of service.name."""
    queue: Positive = 4096
    """Spans that may wait; more are dropped and counted."""

    def __post_init__(self) -> None:
        checked_url(self.endpoint)


class GatewayConfig(Section, frozen=True):
    """[gateway]: an HTTP server that speaks OpenAI's and Anthropic's APIs in front of an engine.

    Example: GatewayConfig(listen="0.0.0.0:8000", train_on="consented")
    """

    listen: str = "127.0.0.1:8000"
    """Address of the server, host:port."""
    train_on: TrainOn = "nothing"
    """Answers that are written to the log: nothing; "consented", those of keys made with `--train yes`; "all", all but those of
    keys made with `--train no`."""
    channel: Channel = "stable"
    """Versions that the gateway serves. "stable" is moved by the gate (the newest version until the first promotion), "canary"
    is the version on trial, and the stable one without a trial, "candidate" is every version."""
    engine: Use | None = None
    """Engine of the gateway. [engine] by default."""
    models: tuple[str, ...] = ()
    """Names of a model that requests may use. Any by default."""
    limits: GatewayLimits = GatewayLimits()
    redact: RedactRules = RedactRules()
    processor: tuple[Use, ...] = ()
    """Processors that run before the first write, as redaction of your own. None by default."""
    queue_records: Positive = 4096
    """Records that may wait for the broker in memory."""
    queue_mb: Positive = 64
    """Megabytes of records that may wait for the broker in memory."""
    spool: str = "spool"
    """Folder, below the run's, of records that wait on disk while the broker is away."""
    spool_mb: NonNegative = 1024
    """Megabytes that the spool may take; beyond them records are shed and counted."""
    send_s: Seconds = 2.0
    """Seconds after which a broker that does not confirm a record counts as away."""
    sessions: Positive = 4096
    """Conversations remembered by session, to go on with their exact tokens; and as many by the id of their last answer."""
    sessions_mb: Positive = 256
    """Megabytes of memory for either kind of conversations."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may send feedback. None by default."""
    canary: CanaryShare | None = None
    traces: TracesConfig | None = None
    refusals: tuple[str, ...] = REFUSALS
    """Regular expressions that the beginning of a refusal matches. Such answers are counted for the gate."""
    keys_reload_s: Seconds = 2.0
    """Seconds between two readings of the keys: how soon a new key works and a revoked key stops working."""
    report_s: Seconds = 2.0
    """Seconds between two reports to the log."""
    drain_s: Seconds = 10.0
    """Seconds that running requests get at a stop."""
    strict: bool = False
    """Whether the gateway refuses requests with a field that it would ignore, or that changes the policy's distribution. By
    default it ignores or serves such fields and names them in response headers."""

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
