"""The role `serve`: an engine behind HTTP that follows the policy and records its answers.

    HTTP ─> Site ─> Gateway ─> engine <── PolicyFollower <── policies
                       └─> Outbox ─> experiences, feedback        KeyBook <── object store

    consumes        requests; policies (versions, decisions, directives); keys of the object store
    produces        answers; experiences, feedback, reports
    waits for       a place among the running requests, and the engine; never for the log
    unblocked by    an answer that ends; a client that disconnects
    durable first   nothing before an answer; feedback before its status 202, in the log or in the spool on disk

Guarantees: it serves requests while the log, the store and all other roles are down. A start during an outage serves the last
version of this gateway (its event is stored next to the spool), or the model folder. A gateway that serves the model
folder is not healthy before it has looked for the version of its channel, for 60 s at most. A reload drops no request. A
stop gives running requests `drain_s`, and sends or spools all recorded answers.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from actors.engines.engine import Engine
from actors.engines.reload import PolicyFollower
from actors.gateway.access.authenticator import Authenticator
from actors.gateway.access.keys import KeyBook
from actors.gateway.config import GatewayConfig, Webhook
from actors.gateway.gateway import Gateway
from actors.gateway.http.app import Site
from actors.gateway.http.canary import Canary
from actors.gateway.recording.feedback_intake import FeedbackIntake
from actors.gateway.recording.held import HeldKeys
from actors.gateway.recording.outbox import Outbox
from actors.gateway.recording.record import Recorder
from actors.gateway.recording.spool import Spool
from infra.files import replace_file
from infra.local.http_server import HttpBounds, HttpServer, bound, make_server, serve_on
from infra.log.log import Log
from infra.model.model import Tokenizer
from infra.observe.metrics import Metrics
from infra.observe.release import full_release
from infra.roles.process import ClaimedFolder
from infra.roles.role import Role, run_until
from infra.store.images import ImageReader
from infra.store.store import Store
from schemas import PolicyEvent, Progress
from schemas.errors import BrokerUnavailable, ConfigError, PolicyRefused, StoreError
from schemas.fields import Life
from schemas.topics import REPORTS

_log = logging.getLogger(__name__)

ROLE = "serve"
_RETRY_S = 1.0
_START_S = 60.0  # for the version of the channel
_MB = 1024 * 1024


async def run_gateway(
    role: Role,
    config: GatewayConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    webhooks: Sequence[Webhook] = (),
    reads_feedback: bool,
    listening: Callable[[int], None] = lambda port: None,
    epoch: int | None = None,
) -> None:
    """Serve until the role is stopped. Its log need not be connected: it is, as soon as the broker answers.

    reads_feedback: whether a source reads /v1/feedback. listening: called with the port once requests are served. Raises
    ConfigError, EngineStopped.
    """
    epoch = secrets.randbits(63) if epoch is None else epoch
    # Its counts begin anew with the process, which may have the number of one before it.
    role = msgspec.structs.replace(role, instance=f"{role.instance}/{epoch % 2**32:08x}")
    floor, metrics = role.floor, role.metrics
    # A folder of its own kind: it holds the version served last, and a stable gateway must not find a canary's.
    claimed = ClaimedFolder(floor.folder / config.spool, "canary" if config.channel == "canary" else ROLE)
    sock = bound(config.listen)  # first: an address in use ends the start before a model is loaded
    try:
        memory = claimed.path / "policy.json"
        follower = PolicyFollower(
            role,
            engine,
            channel=config.channel,
            loaded=lambda event: _remember(memory, event, metrics),
            directed=lambda directive: gateway.follow(directive),
        )
        in_trials = config.channel == "canary" or config.canary is not None
        trial = lambda: follower.stable.trial if in_trials else -1  # noqa: E731
        gateway, authenticator, feedback_intake = await _assembled(
            role, config, engine, tokenizer, claimed.path, epoch, trial
        )
        feedback_intake.is_read = reads_feedback
        canary = None if config.canary is None else Canary(config.canary, metrics)
        await engine.start()
        try:
            await _bring_last(follower, memory, engine, floor.policy.name)
            site = Site(
                gateway, authenticator, feedback_intake, metrics,
                models=tuple(dict.fromkeys((floor.policy.name, *config.models))),
                webhooks=webhooks,
                state=partial(_fault, gateway, follower, time.monotonic() + _START_S),
                canary=canary,
            )  # fmt: skip
            loops = _Loops(role, gateway, follower, authenticator.book, canary)
            refused = lambda reason: metrics.counter("refused", route="", reason=reason).inc()  # noqa: E731
            server = make_server(site.app(), config.drain_s, HttpBounds(limit_s=config.limits.body_s, refused=refused))
            await loops.run(server, sock, listening)
        finally:
            if canary is not None:
                await canary.close()
            await engine.close()
    finally:
        sock.close()
        claimed.release()


class _Loops(msgspec.Struct, frozen=True):
    role: Role
    gateway: Gateway
    follower: PolicyFollower
    book: KeyBook
    canary: Canary | None

    async def run(self, server: HttpServer, sock: socket.socket, listening: Callable[[int], None]) -> None:
        gateway, config, outbox = self.gateway, self.gateway.config, self.gateway.outbox
        halt, connected, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        try:
            await run_until(
                halt,
                serve_on(server, sock, listening),
                _end(server, gateway, config, self.role.stop, halt, lambda: self._tell_last(connected, ended)),
                outbox.write(),
                _lasting("drain", connected, outbox.drain),
                _connect(self.role.log, connected),
                _lasting("policies", connected, self.follower.read),
                _lasting("reload", connected, self.follower.load),
                *(() if self.canary is None else (self.canary.watch(),)),
                _reload_keys(self.book, self.role.store, config, self.role.metrics),
                self._report(connected, ended),
            )
        finally:  # records of requests that ended after `write`: at a stop, or after a loop failed
            await outbox.flush()

    async def _report(self, connected: asyncio.Event, ended: asyncio.Event) -> None:
        await connected.wait()
        while not ended.is_set():
            await self._tell("serving", "working")
            await asyncio.sleep(self.gateway.config.report_s)

    async def _tell_last(self, connected: asyncio.Event, ended: asyncio.Event) -> None:
        """Report the end, if the log is connected; nothing is reported after it."""
        ended.set()
        if connected.is_set():
            await self._tell("stopped", "ended")

    async def _tell(self, state: str, life: Life) -> None:
        gateway, metrics = self.gateway, self.role.metrics
        metrics.gauge("answers_running").set(gateway.limiter.num_taken)
        metrics.gauge("outbox_waiting").set(gateway.outbox.num_waiting)
        metrics.gauge("policy_version").set(gateway.engine.version)
        for name, value in self.follower.times.gauges().items():
            metrics.gauge(name).set(value)
        progress = Progress(
            role=ROLE,
            instance=self.role.instance,
            version=gateway.engine.version,
            counters=metrics.counters(),
            gauges=metrics.gauges(),
            state=state,
            answered=gateway.tallies.report(),
            refused=self.follower.refused,
            life=life,
            is_canary=gateway.config.channel == "canary",
            release=full_release(),
        )
        with suppress(BrokerUnavailable, TimeoutError):  # a late report is useless
            async with asyncio.timeout(gateway.config.report_s):
                await self.role.log.publish(REPORTS, progress)


def _fault(gateway: Gateway, follower: PolicyFollower, until_s: float) -> str:
    if gateway.stopped.done():
        return "the engine has stopped"
    is_new = not follower.settled.is_set() and time.monotonic() < until_s
    return "loading the channel's version" if is_new else ""


async def _assembled(
    role: Role,
    config: GatewayConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    folder: Path,
    epoch: int,
    trial: Callable[[], int],
) -> tuple[Gateway, Authenticator, FeedbackIntake]:
    log, store, metrics = role.log, role.store, role.metrics
    spool = await asyncio.to_thread(lambda: Spool(folder, max_bytes=config.spool_mb * _MB))
    if spool.torn_bytes or spool.damaged:
        _log.warning("spool_recovered torn_bytes=%d damaged_segments=%d", spool.torn_bytes, spool.damaged)
        metrics.counter("spool_torn_bytes").inc(spool.torn_bytes)
        metrics.counter("shed", reason="spool damaged").inc(spool.damaged)
    keys = await asyncio.to_thread(HeldKeys, store, folder / "keys", asyncio.get_running_loop().time)
    outbox = Outbox(
        log,
        spool,
        metrics,
        held=keys,
        queue_records=config.queue_records,
        queue_bytes=config.queue_mb * _MB,
        send_s=config.send_s,
    )
    recorder = Recorder(tokenizer, config.redact, metrics, role.instance, keys, ImageReader(store))
    book = KeyBook()
    gateway = Gateway(config, engine, recorder, outbox, metrics, epoch=epoch, trial=trial, secret=lambda: book.secret)
    if not tokenizer.writing.is_own:
        await asyncio.to_thread(gateway.parser.prepare)
    try:
        await asyncio.to_thread(book.refresh, store)
    except StoreError as error:
        _log.warning("keys_not_read error=%s", error)
    feedback_intake = FeedbackIntake(
        recorder,
        outbox,
        metrics,
        keys,
        secret=lambda: book.secret if book.is_read else b"",
        may_record=gateway.may_record,
    )
    return gateway, Authenticator(book, metrics), feedback_intake


async def _end(
    server: HttpServer,
    gateway: Gateway,
    config: GatewayConfig,
    stop: asyncio.Event,
    halt: asyncio.Event,
    tell: Callable[[], Awaitable[None]],
) -> None:
    """Wait for a stop, or the engine's end; let running requests end, write their records, then halt everything.

    tell: called last, so that the report counts the answers that failed with the engine.
    """
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((stopping, gateway.stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    if gateway.stopped.done():
        await gateway.outbox.flush()
        await tell()
        raise gateway.stopped.result()
    server.leave()  # no new connections; it waits for running requests
    with suppress(TimeoutError):
        async with asyncio.timeout(config.drain_s):
            await gateway.limiter.idle.wait()
    await gateway.outbox.flush()
    await tell()
    halt.set()


async def _connect(log: Log, connected: asyncio.Event) -> None:
    while not connected.is_set():
        try:
            await log.bus.start()
            await log.require_topics()
            connected.set()
            _log.info("log_connected")
        except (BrokerUnavailable, ConfigError) as error:
            _log.warning("log_away error=%s", error)
            await asyncio.sleep(_RETRY_S)
    await asyncio.Event().wait()


async def _lasting(name: str, connected: asyncio.Event, loop: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a loop that reads the log; while the log is away it waits, instead of ending the role."""
    await connected.wait()
    while True:
        try:
            await loop()
        except (BrokerUnavailable, StoreError) as error:
            _log.warning("log_away loop=%s error=%s", name, error)
            await asyncio.sleep(_RETRY_S)


async def _reload_keys(book: KeyBook, store: Store, config: GatewayConfig, metrics: Metrics) -> None:
    """Read the keys again and again. Each failure is counted; it is logged once until its message changes."""
    failed = ""
    while True:
        await asyncio.sleep(config.keys_reload_s)
        try:
            await asyncio.to_thread(book.refresh, store)
        except (StoreError, msgspec.DecodeError) as error:
            metrics.counter("keys_not_read").inc()
            if failed != (failed := str(error)):
                _log.warning("keys_not_read error=%s", error)
        else:
            metrics.counter("keys_read").inc()
            if failed:
                _log.warning("keys_read_again")
            failed = ""


def _remember(path: Path, event: PolicyEvent, metrics: Metrics) -> None:
    """Keep the event of the version that serves, for a start without the log. A full disk ends nothing."""
    try:
        replace_file(path, msgspec.json.encode(event))
    except OSError as error:
        metrics.counter("policy_not_remembered").inc()
        _log.warning("policy_not_remembered version=%d error=%s", event.version, error.strerror)


async def _bring_last(follower: PolicyFollower, path: Path, engine: Engine, policy: str) -> None:
    try:
        event = msgspec.json.decode(await asyncio.to_thread(path.read_bytes), type=PolicyEvent)
        if event.policy != policy:
            raise PolicyRefused(f"got version {event.version} of {event.policy!r}, expected one of {policy!r}")
        async with asyncio.timeout(_START_S):
            await follower.bring(event)
    except FileNotFoundError:
        return
    except (msgspec.DecodeError, StoreError, PolicyRefused, BrokerUnavailable, TimeoutError) as error:
        _log.warning("last_policy_not_loaded error=%s", error)
    _log.info("starting_with version=%d", engine.version)
