"""The gateway without HTTP: takes a request, makes its answers, and hands their records to the outbox.

    prompt ─> tokens ─> engine (one request per choice) ─> text ─> client
                                 └──────── served ─> Recorder ─> Outbox        only with consent

Guarantees: the client's answer waits for the engine and for nothing else; served answers are recorded with their exact
tokens, logprobs and versions, also if the client disconnects in the middle; without consent nothing of an answer is kept.
"""

import asyncio
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

from actors.engines.engine import Engine, EngineStopped, Sampling, SchemaNotTried, SchemaRefused
from actors.gateway.access.concurrency import LONG_AT_ONCE, ConcurrencyLimiter, FairQueue, TakenSlots, to_its_end
from actors.gateway.access.keys import ApiKey, Train
from actors.gateway.answering.conversation import ConversationCache, decoded_pictures
from actors.gateway.answering.in_flight import NOT_SAMPLED, InFlight, Watch, sample_choices
from actors.gateway.answering.parsing import answer_parser, ready, render
from actors.gateway.answering.requests import ParsedRequest
from actors.gateway.answering.sessions import Continuation, Sessions, held
from actors.gateway.config import GatewayConfig
from actors.gateway.errors import ApiError, bad, no_room, unavailable
from actors.gateway.recording.outbox import Outbox, Outgoing
from actors.gateway.recording.record import Recorder
from actors.gateway.recording.tallies import Tallies
from actors.rollout.continuation import SampledTurn
from infra.newest import Newest
from infra.observe.metrics import Metrics
from infra.store.images import Pixels, images_of
from schemas import Directive
from schemas.ids import answer_id, experience_id, forgotten_mark, keyed_session, keyed_subject, request_group, tenant_in
from schemas.topics import EXPERIENCES

_THREAD_CHARS = 4096  # a longer conversation takes milliseconds to tokenize
CHARS_PER_TOKEN = 16  # at most, on the average: a longer prompt is refused before anything else is done with it
MAX_SCHEMAS = 64
MAX_NAMES = 65_536


class Tokenized(NamedTuple):
    """Tokens of a prompt. rendered: by the template. prompt: with earlier turns as sampled. prefix: start of the answer."""

    rendered: list[int]
    prompt: Continuation
    prefix: list[int]


class Gateway:
    """Serves requests on one engine."""

    def __init__(
        self,
        config: GatewayConfig,
        engine: Engine,
        recorder: Recorder,
        outbox: Outbox,
        metrics: Metrics,
        *,
        epoch: int,
        trial: Callable[[], int],
        secret: Callable[[], bytes],
    ) -> None:
        """epoch: random bits in the ids of this start's requests. No other process hands them out: a gateway serves while the
        log is away. trial: the version on trial, -1 for none. secret: key for names in the log.
        """
        self.config = config
        self.engine = engine
        self.tokenizer = recorder.tokenizer
        self.recorder = recorder
        self.parser = answer_parser(recorder.tokenizer)
        self.outbox = outbox
        self.metrics = metrics
        self.limiter = ConcurrencyLimiter(config.limits.concurrency, config.limits.reserved)
        self._long = FairQueue(LONG_AT_ONCE)
        self._pictures = FairQueue(1)
        self._schemas = FairQueue(1)
        self._prepared_schemas: Newest[str, None] = Newest(MAX_SCHEMAS)
        self.stopped: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()
        self.tallies = Tallies(config.refusals)
        self.trial = trial
        self._secret = secret
        self._subjects: Newest[str, str] = Newest(MAX_NAMES)  # by session
        self.served: Newest[str, int] = Newest(MAX_NAMES)  # choices of the newest requests, by group
        self._epoch, self._sequence = epoch, itertools.count()
        self.sessions = Sessions(config.sessions, config.sessions_mb * 1024 * 1024)
        self.conversations = ConversationCache(config.sessions, config.sessions_mb * 1024 * 1024)

    def is_long(self, request: ParsedRequest) -> bool:
        """Return True if the work before the first token takes long, so that a client may disconnect meanwhile."""
        return bool(request.json_schema or request.prompt.pictures) or request.num_chars > _THREAD_CHARS

    def ready(self, request: ParsedRequest) -> ParsedRequest:
        """The request as this model can be asked. Raises ApiError."""
        return ready(request, self.parser, takes_tools=self.tokenizer.takes_tools)

    async def begin(
        self, request: ParsedRequest, key: ApiKey, session: str, place: TakenSlots, *, drawn: bool = True
    ) -> InFlight:
        """Prepare a request for its first token. Raises ApiError.

        request: a `ready` one. place: for its answers, released by the caller. drawn: False if a silent canary or an earlier
        turn sent the request here, so that the gate does not compare its answers.
        """
        if request.prompt.pictures and not self.tokenizer.takes_images:
            raise bad("messages: got an image, but this model reads only text", "messages")
        name = self.request_name(request, key, session)
        images = await self._decoded(request, key)
        tokenized = await self._tokenized(request, key, name if session else "")
        tokens = tokenized.prompt.tokens + tokenized.prefix
        group = request_group(name, self._epoch, next(self._sequence))
        sampling = self._sampling(request, tokens)
        if request.json_schema:
            await self._prepared(request.json_schema, key)
        self.served.put(group, request.choices)
        return InFlight(
            place=place,
            request=request,
            key=key,
            group=group,
            session=name if session else "",
            answer_ids=[answer_id(experience_id(group, 0, index)) for index in range(request.choices)],
            rendered=tokenized.rendered,
            tokens=tokens,
            prefix=tokenized.prefix,
            turn=tokenized.prompt.number,
            reason=tokenized.prompt.reason,
            sampling=sampling,
            trial=self.trial() if drawn else -1,
            subject=self._subject(request, key, name if session else ""),
            parser=self.parser,
            images=images,
        )

    async def count(self, request: ParsedRequest, key: ApiKey) -> int:
        """Tokens of a request's prompt as the template writes it. Raises ApiError."""
        request = self.ready(request)
        return len((await self._tokenized(request, key, "")).rendered)

    async def answer(self, in_flight: InFlight, watch: Watch | None = None) -> None:
        """Sample all choices into `in_flight`. If it is cancelled, it keeps and records the partial answers. Raises ApiError.

        watch: gives the listener of a choice.
        """
        try:
            await sample_choices(self.engine, self.tokenizer.decode, in_flight, watch)
        except Exception as error:
            raise self._failure(error, in_flight) from error
        finally:
            self.release(in_flight)
            self._ended(in_flight)

    def release(self, in_flight: InFlight) -> None:
        """Give back its place; again is fine."""
        in_flight.images = ()
        in_flight.place.release()

    def request_name(self, request: ParsedRequest, key: ApiKey, session: str) -> str:
        """The name of a request in ids: by its session, else by its user, else by itself.

        Requests of the same name meet the same side of a trial, and count as one person there.
        """
        named = session or (f"user\x00{request.user}" if request.user else secrets.token_hex(16))
        return keyed_session(self._secret(), key.tenant, named, key.train)

    def may_record(self, train: Train) -> bool:
        """Return True if requests of a key with this `--train`, and their answers, may be written."""
        allowed = {"nothing": (), "consented": ("yes",), "all": ("yes", "unset")}[self.config.train_on]
        return train in allowed

    def _subject(self, request: ParsedRequest, key: ApiKey, session: str) -> str:
        """Subject whose key seals a turn, "" for none. session: "" for none.

        A session keeps its user. An unnamed turn of an unknown session with answers is sealed under a key of the session;
        `forget` destroys it with the keys of the session's user.
        """
        named = keyed_subject(self._secret(), key.tenant, request.user)
        if not session:
            return named
        goes_on = any(message.role == "assistant" for message in request.prompt.plain)
        known = self._subjects.get(session)
        subject = named or (known if known is not None else session if goes_on else "")
        self._subjects.put(session, subject)
        return subject

    def follow(self, directive: Directive) -> None:
        """Drop the conversations and sessions of a user whom `headrace forget` named."""
        if directive.order != "forget":
            return
        secret, about = self._secret(), directive.about
        for answer in list(self.conversations):
            held = self.conversations.get(answer)
            if held is not None and forgotten_mark(secret, held.subject) == about:
                self.conversations.pop(answer)
        for session in list(self.sessions.held):
            if forgotten_mark(secret, self._subjects.get(session) or "") == about:
                self.sessions.held.pop(session)

    async def _decoded(self, request: ParsedRequest, key: ApiKey) -> tuple[Pixels, ...]:
        prompt = request.prompt
        if not prompt.pictures:
            return ()
        async with self._pictures.turn(key.id):
            decoding = asyncio.to_thread(
                decoded_pictures, images_of(prompt.plain), prompt.pictures, self.config.limits.pixels
            )
            return await to_its_end(decoding)

    async def _tokenized(self, request: ParsedRequest, key: ApiKey, session: str) -> Tokenized:
        """Tokenize the prompt. Long prompts leave the event loop, LONG_AT_ONCE at a time. Raises ApiError."""
        limit = self.config.limits.prompt_tokens * CHARS_PER_TOKEN
        if request.num_chars > limit:
            message = f"messages: got {request.num_chars} characters with the tools, expected at most {limit}"
            raise bad(message, "messages", "context_length_exceeded")
        if request.num_chars <= _THREAD_CHARS:
            return self._tokens(request, session)
        async with self._long.turn(key.id):
            return await to_its_end(asyncio.to_thread(self._tokens, request, session))

    def _tokens(self, request: ParsedRequest, session: str) -> Tokenized:
        rendered = render(request.prompt, self.tokenizer)
        if len(rendered) > self.config.limits.prompt_tokens:
            raise bad(
                f"messages: got {len(rendered)} tokens, expected at most {self.config.limits.prompt_tokens}",
                "messages",
                "context_length_exceeded",
            )
        prompt = Continuation(list(rendered), 0, "")
        if session:
            prompt = self.sessions.prompt(session, request.prompt, rendered, self.tokenizer)
        return Tokenized(rendered, prompt, self.tokenizer.encode(request.force) if request.force else [])

    async def _prepared(self, json_schema: str, key: ApiKey) -> None:
        """Wait until the engine has compiled the schema, before the first byte, so that the request can be refused. Keys take
        turns: a key waits for at most one schema of each other key.
        """
        try:
            if json_schema in self._prepared_schemas:
                await self.engine.prepare(json_schema)
            else:
                async with self._schemas.turn(key.id):
                    await to_its_end(self.engine.prepare(json_schema))
            self._prepared_schemas.put(json_schema, None)
        except SchemaNotTried as error:
            raise unavailable(f"response_format: {error}") from error
        except SchemaRefused as error:
            raise bad(f"response_format: {error}", "response_format", "unsupported_value") from error
        except EngineStopped as error:
            raise self._gone(error) from error

    def _sampling(self, request: ParsedRequest, tokens: Sequence[int]) -> Sampling:
        room = self.engine.max_model_len - len(tokens)
        if room < 1:
            raise no_room(self.engine.max_model_len, len(tokens))
        return Sampling(
            max_tokens=min(request.max_tokens or self.config.limits.max_tokens, room),
            temperature=request.temperature,
            stop=self.tokenizer.eos_ids,
            seed=request.seed,
            top_p=request.top_p,
            json_schema=request.json_schema,
            shaping=request.shaping,
        )

    def _failure(self, error: BaseException, in_flight: InFlight) -> Exception:
        if isinstance(error, ApiError):
            return error
        in_flight.failed = not isinstance(error, ValueError)
        if isinstance(error, EngineStopped):
            return self._gone(error)
        if isinstance(error, ValueError):
            return bad(str(error))
        return error if isinstance(error, Exception) else RuntimeError(repr(error))

    def _gone(self, error: EngineStopped) -> ApiError:
        if not self.stopped.done():
            self.stopped.set_result(error)
        return unavailable("the engine has stopped; it is being started again")

    def _ended(self, in_flight: InFlight) -> None:
        if not in_flight.answers:
            known = [growing.answer(ended=False) for growing in in_flight.growing]
            in_flight.answers = known or [NOT_SAMPLED] * in_flight.request.choices
        whole = all(answer.finish for answer in in_flight.answers)
        metrics = self.metrics
        metrics.counter("answers", end="whole" if whole else "broken off").inc(len(in_flight.answers))
        metrics.counter("tokens").inc(in_flight.num_sampled)
        if whole and in_flight.request.prompt.tools:
            unread = sum(in_flight.parsed(index).unread for index in range(len(in_flight.answers)))
            metrics.counter("calls_unread", parser=self.parser.writing.tools).inc(unread)
        if in_flight.reason:
            metrics.counter("sessions_split", reason=in_flight.reason).inc()
        self._tally(in_flight, whole)
        if in_flight.session:
            self._remember(in_flight, whole)
        if not (self.may_record(in_flight.key.train) and in_flight.request.store):
            metrics.counter("not_recorded", reason="no consent").inc(len(in_flight.answers))
            return
        if reason := in_flight.request.untrained:
            metrics.counter("recorded_without_ratio", reason=reason).inc(len(in_flight.answers))
        if in_flight.num_sampled:
            self._record(in_flight)

    def _tally(self, in_flight: InFlight, whole: bool) -> None:
        """Count for the gate. A client that went away says nothing about the engine."""
        asker = tenant_in(in_flight.group), in_flight.session or in_flight.subject or in_flight.group
        if in_flight.failed:
            self.tallies.failed(self.engine.version, in_flight.trial, in_flight.request.choices, *asker)
        elif whole:
            version = min(answer.completion.spans[0].version for answer in in_flight.answers)
            self.tallies.answered(version, in_flight.trial, [answer.text for answer in in_flight.answers], *asker)

    def _remember(self, in_flight: InFlight, whole: bool) -> None:
        if not whole or in_flight.answers[0].cut or len(in_flight.answers) > 1:
            return  # the next turn continues the last stored turn
        answer, completion, prompt = in_flight.answers[0], in_flight.answers[0].completion, in_flight.request.prompt
        text, tokens = in_flight.request.force + answer.text, [*in_flight.prefix, *completion.tokens]
        self.sessions.keep(
            in_flight.session,
            held(
                [*in_flight.tokens, *completion.tokens],
                SampledTurn(in_flight.rendered, tokens, text, completion.stopped, prompt.tools_digest),
                (*prompt.plain, in_flight.said(0)),
                in_flight.turn + 1,
            ),
        )

    def _record(self, in_flight: InFlight) -> None:
        prompt = in_flight.request.prompt
        num_bytes = sum(map(len, prompt.pictures)) + sum(len(message.content) for message in prompt.plain)
        num_bytes += 8 * (len(in_flight.rendered) + len(in_flight.tokens) + in_flight.num_sampled)
        self.outbox.offer(Outgoing(EXPERIENCES, lambda: self.recorder.block(in_flight), num_bytes))
