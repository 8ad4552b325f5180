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
    """[gateway.limits]: limits of a request. Above them the gateway answers with status 400, 413 or 429.

    Example: GatewayLimits(max_tokens=2048, concurrency=512)
    """

    body_bytes: Positive = 1024 * 1024
    """Maximum bytes of a request body. Unfinished bodies of a key, or of a webhook's client address, may hold 8 times this."""
    prompt_tokens: Positive = 32_768
    """Maximum tokens of a conversation. A longer text than 16 characters per token is refused before tokenization."""
    messages: Positive = 1024
    """Maximum messages of a conversation."""
    images: Positive = 8
    """Maximum images of a conversation."""
    pixels: Positive = 4_194_304
    """Maximum pixels of all images of a request. With the default, decoding takes up to 0.2 s of a core, in a separate thread,
    for one request at a time. A running answer holds 3 bytes per pixel."""
    tools: Positive = 128
    """Maximum functions (tools) of a request."""
    max_tokens: Positive = 1024
    """Maximum tokens of an answer, also if a request sets more or nothing. The engine's sequence length may allow fewer."""
    choices: Positive = 8
    """Maximum answers of a request, its `n`. At most as many as `concurrency` grants a single key."""
    stops: Positive = 16
    """Maximum stop strings of a request."""
    concurrency: Positive = 256
    """Maximum answers in progress, including those of a canary. An eighth, above 1 at least one, is reserved for keys with few
    answers in progress."""
    body_s: Seconds = 30.0
    """Seconds that a client may take for a head, for a body, between two requests, and between two reads of an answer. Then the
    gateway closes the connection."""

    @property
    def reserved(self) -> int:
        """Answers in progress that are reserved for keys with at most as many."""
        return min(self.concurrency - 1, max(1, self.concurrency // 8))


class RedactRules(Section, frozen=True):
    """[gateway.redact]: removal of secrets and personal data before the first write.

    Example: RedactRules(patterns={"ticket": "T-[0-9]+"})
    """

    on: bool = True
    """Whether the gateway searches texts."""
    kinds: tuple[Kind, ...] = KINDS
    """Built-in patterns. All by default."""
    patterns: dict[str, str] = msgspec.field(default_factory=dict)
    """Your own patterns, from name to regular expression."""
    action: Literal["mask", "drop"] = "mask"
    """Action on a match. "mask" writes `[email]` in its place and records the tokens of the masked text, without a ratio.
    "drop" does not record the answer."""
    images: Literal["drop", "keep"] = "drop"
    """Action on answers to requests with images, which the gateway cannot search. "drop" does not record them. "keep"
    records them, except for named users: images are not encrypted, so `headrace forget` could not delete them."""


class CanaryShare(Section, frozen=True):
    """[gateway.canary]: second gateway (`headrace serve --channel canary`) that answers a share of the sessions. While it fails
    or does not answer, this gateway answers them. Both need the same object store, for the API keys.

    Example: CanaryShare(url="http://127.0.0.1:8010", share=0.1)
    """

    url: str
    """URL at which this gateway reaches the canary."""
    share: Share = 0.1
    """Share of the sessions for the canary, 0 to 1. A session keeps its gateway. Requests without a session are assigned by
    user, those without a user at random."""
    listen: str = ""
    """Address at which the canary listens, host:port. Default "": the address in `url`."""

    def __post_init__(self) -> None:
        parts = urlsplit(checked_url(self.url))
        if parts.path.strip("/") or parts.query:
            raise ValueError(f'got url = "{without_secrets(self.url)}", expected a URL such as "http://127.0.0.1:8010"')
        split_address(self.address)

    @property
    def address(self) -> str:
        """Address at which the canary listens, host:port."""
        parts = urlsplit(self.url)
        return self.listen or f"{parts.hostname}:{parts.port or 80}"


class GatewayConfig(Section, frozen=True):
    """[gateway]: HTTP server with OpenAI's and Anthropic's APIs in front of an engine.

    Example: GatewayConfig(listen="0.0.0.0:8000", train_on="consented")
    """

    listen: str = "127.0.0.1:8000"
    """Address of the gateway, host:port."""
    train_on: TrainOn = "nothing"
    """Answers that the gateway records for training. "nothing": none. "consented": answers to keys with `--train yes`.
    "all": all except answers to keys with `--train no`."""
    channel: Channel = "stable"
    """Version that the gateway serves. "stable": the version that the gate promoted; until the first promotion, the newest.
    "canary": the version on trial; without a trial, the stable version. "candidate": the newest version."""
    engine: Use | None = None
    """Engine of the gateway. Default: [engine]."""
    models: tuple[str, ...] = ()
    """Model names that requests may use. Default []: any name."""
    limits: GatewayLimits = GatewayLimits()
    redact: RedactRules = RedactRules()
    queue_records: Positive = 4096
    """Maximum records that wait for the broker in memory."""
    queue_mb: Positive = 64
    """Maximum megabytes of records that wait for the broker in memory."""
    spool: str = "spool"
    """Folder, relative to the TOML, of records that wait on disk while the broker is unreachable."""
    spool_mb: NonNegative = 1024
    """Maximum megabytes of the spool; the gateway drops and counts further records."""
    send_s: Seconds = 2.0
    """Seconds without a confirmation after which the gateway treats the broker as unreachable."""
    sessions: Positive = 4096
    """Maximum conversations kept by session, to continue with their exact tokens, and as many by the id of the last answer."""
    sessions_mb: Positive = 256
    """Maximum megabytes of memory for each of the two kinds of conversations."""
    canary: CanaryShare | None = None
    refusals: tuple[str, ...] = REFUSALS
    """Regular expressions of a refusal, searched at the beginning of an answer. The gate counts refusals."""
    keys_reload_s: Seconds = 2.0
    """Seconds between two reads of the API keys, after which a new key works and a revoked key stops working."""
    report_s: Seconds = 2.0
    """Seconds between two status reports to the log."""
    drain_s: Seconds = 10.0
    """Seconds for running requests to finish at a stop."""
    strict: bool = False
    """Whether the gateway refuses requests with fields that it would ignore or that change the policy's distribution. Default
    false: it ignores or serves such fields and names them in response headers."""

    def __post_init__(self) -> None:
        split_address(self.listen)
        check_patterns("refusals", self.refusals)

    def as_canary(self) -> "GatewayConfig":
        """The settings of this gateway's canary."""
        listen = self.listen if self.canary is None else self.canary.address
        return msgspec.structs.replace(self, channel="canary", listen=listen, canary=None)


class Webhook(msgspec.Struct, frozen=True):
    """A path for signed feedback from another system. secret: signing secret. header: HTTP header with the signature.

    timestamp_header: header with a signed timestamp, "" for none. tenant: tenant whose answers it may name, "" for all.
    path: path of the POST requests.

    Example: Webhook(path="/zendesk", secret=b"…", header="x-signature")
    """

    path: str
    secret: bytes
    header: str
    timestamp_header: str = ""
    tenant: str = ""
