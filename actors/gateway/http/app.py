"""The gateway's HTTP: routes, bodies, keys and error objects. The modules in `actors.gateway.apis` interpret requests.

Guarantees: every refusal has a status, an error object and a counter; a body is never read beyond its bound nor waited
for beyond its time; a client that goes away frees the engine.
"""

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.gateway.access.authenticator import Authenticator
from actors.gateway.access.concurrency import ReleasingStream, TakenSlots
from actors.gateway.access.keys import ApiKey, Scope
from actors.gateway.answering.conversation import Conversation
from actors.gateway.answering.in_flight import InFlight
from actors.gateway.answering.requests import (
    SESSION_END_HEADER,
    SESSION_HEADER,
    ParsedRequest,
    check_strictly,
    ends_session,
)
from actors.gateway.apis.api import Api, Reply
from actors.gateway.apis.completions import CHAT
from actors.gateway.apis.messages import MESSAGES, read_messages
from actors.gateway.apis.responses import RESPONSES, after
from actors.gateway.config import GatewayLimits, Webhook
from actors.gateway.errors import ApiError, bad, unavailable
from actors.gateway.gateway import Gateway
from actors.gateway.http.body import (
    BodyBudget,
    error_response,
    json_response,
    presented,
    read_body,
    replied,
    unless_gone,
)
from actors.gateway.http.canary import VERSION_HEADER, Canary
from actors.gateway.http.stream import EventStream
from actors.gateway.recording.feedback_intake import PATH, FeedbackIntake, check_signature, nth_answer, read_feedback
from infra.observe.metrics import Metrics
from schemas.ids import group_of

# The APIs in which clients ask for answers, by their paths.
APIS: Mapping[str, Api] = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}
COUNT_PATH = "/v1/messages/count_tokens"
MODELS_PATH = "/v1/models"
# Method and scope of every route that all gateways have, by its path; no scope: without a key.
ROUTES: Mapping[str, tuple[str, Scope | None]] = {
    **dict.fromkeys(APIS, ("POST", "serve")),
    COUNT_PATH: ("POST", "serve"),
    MODELS_PATH: ("GET", "serve"),
    PATH: ("POST", "feedback"),
    "/healthz": ("GET", None),
    "/metrics": ("GET", "admin"),
}
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # seconds
IGNORED_HEADER = "x-headrace-ignored"
TRAINED_HEADER = "x-headrace-trained"
MAX_NAMED = 32  # fields in a header
MAX_BODIES = 256  # of a key or an address that have not come whole
FIRST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
NOTES = {
    "not known": "unknown answer_id at this gateway; the feedback applies if the answer is found before its window ends",
    "no consent": "not recorded: the key that was answered, or this key, may not be trained on",
    "no source": 'not recorded: no [[feedback]] source has from = { webhook = "/v1/feedback" }',
}
Handler = Callable[[Request], Awaitable[Response]]


def api_at(path: str) -> Api:
    """The API whose error objects a route has."""
    return MESSAGES if path == COUNT_PATH else APIS.get(path, CHAT)


class Site:
    """The routes over one gateway. models: accepted model names, its own first. state: why it does not serve, "" if it
    serves. canary: gateway that answers a share of the sessions.
    """

    def __init__(
        self,
        gateway: Gateway,
        authenticator: Authenticator,
        feedback_intake: FeedbackIntake,
        metrics: Metrics,
        *,
        models: Sequence[str],
        webhooks: Sequence[Webhook],
        state: Callable[[], str],
        canary: Canary | None = None,
    ) -> None:
        self._canary = canary
        self._gateway = gateway
        self._authenticator = authenticator
        self._feedback_intake = feedback_intake
        self._metrics = metrics
        self._models = tuple(models)
        self._webhooks = {webhook.path: webhook for webhook in webhooks}
        self._state = state
        self._limits: GatewayLimits = gateway.config.limits
        self._bodies = BodyBudget(8 * self._limits.body_bytes, 64 * self._limits.body_bytes, MAX_BODIES)

    def app(self) -> Starlette:
        handlers: dict[str, Handler] = {
            **{path: partial(self._answer, api=api) for path, api in APIS.items()},
            COUNT_PATH: self._count,
            MODELS_PATH: self._list_models,
            PATH: self._feedback,
            "/healthz": self._health,
            "/metrics": self._measure,
        }
        served = [(method, path, handlers[path]) for path, (method, _) in ROUTES.items()]
        served += [("POST", path, self._webhook) for path in self._webhooks]
        routes = [Route(path, self._guarded(path, handler), methods=[method]) for method, path, handler in served]
        return Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})

    def _guarded(self, path: str, handler: Handler) -> Handler:
        """The handler behind the authenticator; errors become error objects and are counted."""
        _, scope = ROUTES.get(path, ("POST", None))

        def refused(error: ApiError) -> None:
            self._metrics.counter("refused", route=path, reason=error.reason).inc()

        async def work(request: Request) -> Response:
            if scope is not None:
                request.state.key = self._authenticator.enter(scope, presented(request.headers))
            return await handler(request)

        async def handle(request: Request) -> Response:
            request.state.began_s = time.monotonic()
            response = await replied(work(request), api_at(path), path, refused)
            self._metrics.counter("requests", route=path, status=str(response.status_code)).inc()

            def over() -> None:
                passed_s = time.monotonic() - request.state.began_s
                self._metrics.histogram("request_s", buckets=REQUEST_BUCKETS, route=path).observe(passed_s)

            if isinstance(response, ReleasingStream):
                response.at_end.callback(over)
            else:
                over()
            return response

        return handle

    async def _answer(self, request: Request, api: Api) -> Response:
        key, body = await self._admitted(request)
        gateway = self._gateway
        recall = partial(gateway.conversations.find, tenant=key.tenant)
        parsed = gateway.ready(api.read(body, self._limits, recall))
        if gateway.config.strict:
            check_strictly(parsed)
        if parsed.choices > 1:
            self._authenticator.admit(key, parsed.choices - 1)
        if ends_session(request.headers.get(SESSION_END_HEADER, "")):
            parsed = msgspec.structs.replace(parsed, ends_session=True)
        self._check_model(parsed)
        session = (
            request.headers.get(SESSION_HEADER, "") or parsed.goes_on or (secrets.token_hex(16) if parsed.said else "")
        )
        if len(session) > 512:
            raise bad(f"{SESSION_HEADER}: got {len(session)} characters, expected at most 512", SESSION_HEADER)
        place = self._gateway.limiter.take(parsed.choices, key.id)
        held = False
        try:
            response = await self._answered(request, body, parsed, api, session, place)
            if held := isinstance(response, ReleasingStream):
                response.at_end.callback(place.release)
            self._note(response, parsed, key, request.url.path)
            return response
        finally:
            if not held:
                place.release()

    def _note(self, response: Response, parsed: ParsedRequest, key: ApiKey, route: str) -> None:
        """Name in headers the fields that changed nothing, and whether the answer can be trained on."""
        if parsed.ignored:
            self._metrics.counter("fields_ignored", route=route).inc(len(parsed.ignored))
            named = [name[:64] for name in parsed.ignored if name.isascii() and name.isprintable()]
            response.headers[IGNORED_HEADER] = ", ".join(named[:MAX_NAMED])
        if parsed.untrained or not (parsed.store and self._gateway.may_record(key.train)):
            response.headers[TRAINED_HEADER] = "no"

    async def _admitted(self, request: Request) -> tuple[ApiKey, bytes]:
        """The key and the body of a request, which counts for the key's quota. Raises ApiError."""
        key: ApiKey = request.state.key
        self._authenticator.admit(key)
        body = await read_body(request, self._limits.body_bytes, self._bodies, key.id)
        self._authenticator.check_live(key)  # the body may have taken long
        return key, body

    async def _answered(
        self, request: Request, body: bytes, parsed: ParsedRequest, api: Api, session: str, place: TakenSlots
    ) -> Response:
        key: ApiKey = request.state.key
        self._check_version(request)
        inside = self._canary is not None and self._canary.takes(
            self._gateway.request_name(parsed, key, session), self._gateway.trial(), self._authenticator.book.secret
        )
        known_here = bool(parsed.said)  # a conversation that continues by ids is known to one gateway
        if inside and not known_here and (response := await self._from_canary(request, body, parsed, api)) is not None:
            return response
        beginning = self._gateway.begin(
            parsed, key, session, place, drawn=self._canary is None or not (inside or known_here)
        )
        in_flight = await (unless_gone(request, beginning) if self._gateway.is_long(parsed) else beginning)
        self._check_version(request)  # again: a reload does not wait for the tokenization of a prompt
        reply = Reply(
            in_flight=in_flight,
            decode=self._gateway.tokenizer.decode,
            created=int(self._authenticator.now_s()),
            version=self._gateway.engine.version,
        )
        if parsed.stream:
            return self._streamed(reply, api, session, request)
        try:
            await unless_gone(request, self._gateway.answer(in_flight))
        finally:
            self._gateway.release(in_flight)
            self._charge(in_flight)
        self._keep(reply, session)
        return json_response(api.whole(reply))

    def _check_version(self, request: Request) -> None:
        wanted = request.headers.get(VERSION_HEADER, "")
        if wanted and wanted != str(self._gateway.engine.version):
            raise unavailable(f"version {wanted[:20]} is not served here now")

    async def _from_canary(self, request: Request, body: bytes, parsed: ParsedRequest, api: Api) -> Response | None:
        assert self._canary is not None
        trial = self._gateway.trial()
        version = trial if trial >= 0 else self._gateway.engine.version
        work = self._canary.answer(
            request.url.path,
            {**request.headers, VERSION_HEADER: str(version)},
            body,
            api=api,
            stream=parsed.stream,
            choices=parsed.choices,
        )
        return await unless_gone(request, work)

    def _streamed(self, reply: Reply, api: Api, session: str, request: Request) -> ReleasingStream:
        def began() -> None:
            passed_s = time.monotonic() - request.state.began_s
            path = request.scope["path"]
            self._metrics.histogram("first_token_s", buckets=FIRST_BUCKETS, route=path).observe(passed_s)

        stream = EventStream(self._gateway, reply, api, lambda: self._keep(reply, session), began)
        response = ReleasingStream(stream.events())
        response.at_end.callback(self._charge, reply.in_flight)
        response.at_end.callback(self._gateway.release, reply.in_flight)
        return response

    def _keep(self, reply: Reply, session: str) -> None:
        if reply.request.said:
            self._gateway.conversations.put(
                reply.answer_ids[0],
                Conversation(
                    tenant=reply.in_flight.key.tenant,
                    subject=reply.in_flight.subject,
                    session=session,
                    messages=after(reply),
                ),
            )

    def _charge(self, in_flight: InFlight) -> None:
        self._authenticator.charge(in_flight.key, len(in_flight.tokens) + in_flight.num_sampled)

    async def _count(self, request: Request) -> Response:
        key, body = await self._admitted(request)
        parsed = read_messages(body, self._limits)
        self._check_model(parsed)
        counting = self._gateway.count(parsed, key)
        num_tokens = await (unless_gone(request, counting) if self._gateway.is_long(parsed) else counting)
        return json_response({"input_tokens": num_tokens})

    def _check_model(self, parsed: ParsedRequest) -> None:
        if self._gateway.config.models and parsed.model not in self._models:
            raise ApiError(404, f"The model `{parsed.model}` does not exist", param="model", code="model_not_found")

    async def _list_models(self, request: Request) -> Response:
        return json_response(model_list(self._models, self._gateway.engine.version))

    async def _feedback(self, request: Request) -> Response:
        key, body = await self._admitted(request)
        feedback = read_feedback(body)
        answer, choice = nth_answer(feedback.answer_id, feedback.choice)
        train = self._authenticator.check_answer(key, answer)
        choices = self._gateway.served.get(group_of(answer)) or self._limits.choices
        if not 0 <= choice < choices:  # a choice that the request cannot have had
            raise bad(f"choice: got {choice} of a response with at most {choices} choices", "choice")
        identity, reason = feedback.id or "", ""
        if not (self._gateway.may_record(key.train) and self._gateway.may_record(train)):
            reason = "no consent"
        elif not self._feedback_intake.is_read:
            reason = "no source"
            self._metrics.counter("feedback_unread").inc()
        if not reason:
            identity = await self._feedback_intake.feedback(feedback, answer=answer, key=key)
        else:
            self._metrics.counter("feedback_received", path=PATH, outcome=reason).inc()
        reply = {"object": "feedback", "id": identity, "answer_id": answer, "recorded": not reason}
        if (
            not reason and group_of(answer) not in self._gateway.served
        ):  # another gateway's, of long ago, or never given
            self._metrics.counter("feedback_not_known_here").inc()
            reason = "not known"
        return json_response(reply | ({"note": NOTES[reason]} if reason else {}), status=202)

    async def _webhook(self, request: Request) -> Response:
        webhook = self._webhooks[request.url.path]
        address = request.client.host if request.client else ""
        body = await read_body(request, self._limits.body_bytes, self._bodies, address)
        check_signature(webhook, request.headers, body, self._authenticator.now_s())
        if self._gateway.config.train_on == "nothing":
            self._metrics.counter("feedback_received", path=webhook.path, outcome="no consent").inc()
        else:
            await self._feedback_intake.webhook(webhook, body)
        return json_response(b"{}", status=202)

    async def _health(self, request: Request) -> Response:
        state = self._state()
        health = {"status": state or "ok", "version": self._gateway.engine.version}
        return json_response(health | {"channel": self._gateway.config.channel}, status=503 if state else 200)

    async def _measure(self, request: Request) -> Response:
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4")


def model_list(names: Sequence[str], version: int) -> dict[str, Any]:
    """Models as OpenAI's API lists them, with the version of their weights."""
    about = {"object": "model", "created": 0, "owned_by": "headrace", "version": version}
    return {"object": "list", "data": [{"id": name, **about} for name in names]}


async def _no_route(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    message = f"Invalid URL ({request.method} {request.url.path[:200]})"
    return error_response(ApiError(status, message, code="unknown_url"), CHAT)
