"""One episode of a program: answers its requests by the policy, and records them into the episode's token sequences.

Guarantees: every token of every answer is recorded as it was sampled, with its logprob and version; an answer that the program
did not get is not recorded; requests at once, sub-agents and rewritten history are sequences of their own, and each says why.
"""

import asyncio
import secrets
from typing import Any

import msgspec

from actors.engines.engine import ContextFull, EngineStopped, Sampling
from actors.gateway.access.concurrency import ConcurrencyLimiter
from actors.gateway.access.keys import ApiKey
from actors.gateway.answering.conversation import ConversationCache, decoded_pictures
from actors.gateway.answering.in_flight import InFlight, Watch, sample_choices
from actors.gateway.answering.parsing import AnswerParser, ready, render
from actors.gateway.answering.requests import ParsedRequest
from actors.gateway.answering.sessions import behind_answer
from actors.gateway.errors import ApiError, bad, no_room, unavailable
from actors.rollout.continuation import SampledTurn
from actors.rollout.parts import AT_ONCE, Follow, GrowingPart
from actors.rollout.session import LONG_CHARS, Session, apart
from infra.model.model import Tokenizer
from infra.store.images import Pixels, images_of
from schemas import Score

MAX_PIXELS = 16 * 1024 * 1024  # of all pictures of a request


class ProgramEpisode:
    """The policy as one program meets it. at_once: answers being made. requests: of the whole episode. own_sampling:
    temperature, top_p and seed as the program asks, not as the task says.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        parser: AnswerParser,
        *,
        at_once: int,
        requests: int,
        own_sampling: bool = False,
    ) -> None:
        self.key = f"hr-{secrets.token_urlsafe(24)}"
        self.conversations = ConversationCache(requests, 64 * 1024 * 1024)
        self.stopped: EngineStopped | None = None
        self.is_full = False
        self.num_asked = 0
        self._session = session
        self._tokenizer = tokenizer
        self.decode = tokenizer.decode
        self._requests = requests
        self._own_sampling = own_sampling
        self._parser = parser
        self._num_unread = 0
        self._deposited: set[str] = set()
        self._limiter = ConcurrencyLimiter(at_once)
        self._placing = asyncio.Lock()
        self._api_key = ApiKey(id="episode", tenant="", scopes=("serve",), sha256="")
        self._parts: dict[str, list[GrowingPart]] = {}
        self._scored: dict[str, tuple[GrowingPart, int]] = {}

    @property
    def version(self) -> int:
        return self._session.engine.version

    def count(self, request: ParsedRequest) -> int:
        """Tokens of a request's prompt as the template writes it. Raises ApiError."""
        request = ready(request, self._parser, takes_tools=self._tokenizer.takes_tools)
        return len(render(request.prompt, self._tokenizer))

    async def begin(self, request: ParsedRequest) -> InFlight:
        """Prepare a request for its first token. Raises ApiError."""
        if self.num_asked >= self._requests:
            raise ApiError(403, f"this episode has used its {self._requests} requests", code="episode_over")
        images = await self._shown(request)
        request = ready(request, self._parser, takes_tools=self._tokenizer.takes_tools)
        place = self._limiter.take(request.choices)
        self.num_asked += 1
        try:
            is_long = request.num_chars > LONG_CHARS
            prompt, plain = request.prompt, request.prompt.plain
            rendered = await apart(is_long, render, prompt, self._tokenizer)
            parts = self._session.parts
            async with self._placing:  # no other request finds the part before it is marked
                found = await apart(is_long, parts.find, plain, rendered, self._follow(request))
                forced = self._tokenizer.encode(request.force) if request.force else []
                sampling = self._sampling(request, len(found.prompt) + len(forced))
                mine = [found.part or parts.begin(found.reason)]
                mine += [parts.begin(AT_ONCE) for _ in range(request.choices - 1)]
                for part in mine:
                    part.sampling = True
        except BaseException:
            place.release()
            raise
        name = secrets.token_hex(8)
        in_flight = InFlight(
            place=place,
            request=request,
            key=self._api_key,
            group=name,
            answer_ids=[f"hr-{name}-{index}" for index in range(request.choices)],
            rendered=rendered,
            tokens=[*found.prompt, *forced],
            prefix=forced,
            sampling=sampling,
            parser=self._parser,
            images=images,
        )
        self._parts[name] = mine
        return in_flight

    async def _shown(self, request: ParsedRequest) -> tuple[Pixels, ...]:
        """Pixels of a request's pictures, whose bytes are put where the trainer looks for them. Raises ApiError."""
        pictures, images = request.prompt.pictures, images_of(request.prompt.plain)
        if not pictures:
            return ()
        store = self._session.images
        if store is None or not self._tokenizer.takes_images:
            raise bad("messages: got an image, but this model reads only text", "messages")
        pixels = await asyncio.to_thread(decoded_pictures, images, pictures, MAX_PIXELS)
        for image, data in zip(images, pictures, strict=True):
            if image.sha256 not in self._deposited:
                await asyncio.to_thread(store.deposit, image, data)
                self._deposited.add(image.sha256)
        return pixels

    async def answer(self, in_flight: InFlight, watch: Watch | None = None) -> None:
        """Sample all choices into `in_flight` and record them; cancelled, nothing is recorded. Raises ApiError."""
        parts = self._parts[in_flight.group]
        try:
            await sample_choices(self._session.engine, self._tokenizer.decode, in_flight, watch)
        except Exception as error:
            raise self._refused(error) from error
        else:
            for index, part in enumerate(parts):
                self._record(in_flight, index, part)
        finally:
            self.release(in_flight)

    def release(self, in_flight: InFlight) -> None:
        """Give back its place; again is fine."""
        for part in self._parts.pop(in_flight.group, ()):
            part.sampling = False
            if not part.tokens:  # nothing came of it
                self._session.parts.all.remove(part)
        in_flight.images = ()
        in_flight.place.release()

    def score(self, answer: str, name: str, value: float) -> bool:
        """A verdict on one turn, at its last token; False where no answer has that id."""
        if answer not in self._scored:
            return False
        part, at = self._scored[answer]
        part.scores.append(Score(name=name, value=value, at=at))
        return True

    def _record(self, in_flight: InFlight, index: int, part: GrowingPart) -> None:
        answer = in_flight.answers[index]
        if in_flight.parsed(index).unread:
            self._num_unread += 1
            self._session.note("calls_unread", self._num_unread)
        known = part.conversation
        part.add(
            in_flight.tokens,
            in_flight.rendered,
            answer.completion,
            (*known, *in_flight.request.prompt.plain[len(known) :], in_flight.said(index)),
            forced=in_flight.prefix,
            said=in_flight.request.force + answer.text,
        )
        part.cut, part.tools = answer.cut, in_flight.request.prompt.tools_digest
        self._session.parts.last = part
        self._scored[in_flight.answer_ids[index]] = (part, len(part.tokens) - 1)

    def _follow(self, request: ParsedRequest) -> Follow:
        def follow(turn: SampledTurn, known: int) -> list[int] | None:
            return behind_answer(request.prompt, turn, known, self._tokenizer) if known else None

        return follow

    def _sampling(self, request: ParsedRequest, num_prompt: int) -> Sampling:
        own = self._session.sampling
        room = self._session.engine.max_model_len - num_prompt
        if room < 1:
            self.is_full = True
            raise no_room(self._session.engine.max_model_len, num_prompt)
        drawn: dict[str, Any] = {}
        if self._own_sampling:
            drawn = {name: getattr(request, name) for name in ("temperature", "top_p", "seed", "shaping")}
        return msgspec.structs.replace(
            own,
            max_tokens=min(request.max_tokens or own.max_tokens, own.max_tokens, room),
            json_schema=request.json_schema,
            **drawn,
        )

    def _refused(self, error: BaseException) -> Exception:
        if isinstance(error, EngineStopped):
            self.stopped = error
            return unavailable("the engine has stopped")
        if isinstance(error, ContextFull):
            self.is_full = True
            return bad(str(error), "messages", "context_length_exceeded")
        if isinstance(error, ValueError):
            return bad(str(error))
        return error if isinstance(error, Exception) else RuntimeError(repr(error))
