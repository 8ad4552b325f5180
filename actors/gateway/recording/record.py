"""Makes experiences of served requests, redacted before they are written.

Guarantee: if redaction changes a text, the record has the tokens of the changed text, since token ids reveal a text as letters
do. Such spans have no ratio. This module seals answers to a named user under the user's key, before queue, spool and log. It
sends nothing.
"""

import asyncio
import logging

from msgspec.structs import replace

from actors.gateway.answering.conversation import Prompt
from actors.gateway.answering.in_flight import InFlight, SampledAnswer
from actors.gateway.answering.parsing import render
from actors.gateway.config import RedactRules
from infra.chain.redact import Redactor
from infra.model.model import Tokenizer
from infra.observe.metrics import Metrics
from infra.store.images import ImageReader, images_of
from infra.store.seal import Keys, sealed
from schemas import Block, Experience, Message, make_experience
from schemas.errors import Sealed, StoreError
from schemas.ids import experience_id

_log = logging.getLogger(__name__)

BROKEN_OFF = "broken off"  # by a client that went away, or an engine that failed


class Recorder:
    """Makes blocks of served answers. origin: this gateway. keys: keys of named users. images: stores
    the pictures of the prompts.
    """

    def __init__(
        self, tokenizer: Tokenizer, rules: RedactRules, metrics: Metrics, origin: str, keys: Keys, images: ImageReader
    ) -> None:
        self.tokenizer = tokenizer
        self._rules = rules
        self._redactor = Redactor(rules.kinds, rules.patterns)
        self._metrics = metrics
        self._origin = origin
        self._keys = keys
        self._images = images

    async def block(self, served: InFlight) -> Block | None:
        """The block to write of a request that was answered; None if all of it was dropped, with the reason counted."""
        kept = await asyncio.to_thread(self._all, served)
        if kept and served.request.prompt.pictures and not await self._deposited(served.request.prompt):
            kept = []
        block = await self._sealed(Block(tuple(kept)), served.subject) if kept else None
        self._metrics.counter("recorded").inc(len(block.experiences) if block is not None else 0)
        return block

    async def _deposited(self, prompt: Prompt) -> bool:
        """Put the pictures into the store; False if it does not take them."""
        try:
            for image, data in zip(images_of(prompt.plain), prompt.pictures, strict=True):
                await asyncio.to_thread(self._images.deposit, image, data)
        except StoreError as error:
            _log.warning("pictures_not_kept error=%s", error)
            self._drop("pictures not kept")
            return False
        return True

    async def _sealed(self, block: Block, subject: str) -> Block | None:
        """The sealed block; None if it names a user and no key is to be had."""
        if not subject:
            return block
        try:
            return await asyncio.to_thread(sealed, block, self._keys, subject)
        except (StoreError, Sealed) as error:
            _log.warning("not_sealed group=%s error=%s", block.group, error)
            self._drop("no key", len(block.experiences))
            return None

    def _all(self, served: InFlight) -> list[Experience]:
        kept: list[Experience] = []
        if served.request.prompt.pictures and (served.subject or self._rules.images == "drop"):
            self._drop("pictures of a named user" if served.subject else "pictures", len(served.answers))
            return kept
        for index, answer in enumerate(served.answers):
            if not answer.completion.tokens:
                self._drop("nothing was sampled")
                continue
            experience = self._experience(served, answer, index)
            redacted = self._redacted(served, experience) if self._rules.on else experience
            if redacted is not None:
                kept.append(redacted)
        return kept

    async def masked(self, value: object) -> object:
        """A JSON value from outside (feedback) as it may be written."""
        return await asyncio.to_thread(self._redactor.mask_json, value) if self._rules.on else value

    def _experience(self, served: InFlight, answer: SampledAnswer, index: int) -> Experience:
        start = len(served.tokens)
        spans = tuple(
            replace(span, start=start + span.start, stop=start + span.stop) for span in answer.completion.spans
        )
        plain = served.request.prompt.plain
        return make_experience(
            tokens=[*served.tokens, *answer.completion.tokens],
            logprobs=answer.completion.logprobs,
            messages=(*plain, Message(role="assistant", content=served.request.force + answer.text)),
            id=experience_id(served.group, 0, index),
            group=served.group,
            episode=index,
            group_size=len(served.answers),
            end="terminal" if answer.finish == "stop" else "truncated",
            lane="live",
            origin=self._origin,
            tenant=served.key.tenant,
            subject=served.subject,
            spans=spans,
            turn=len(plain) if served.session else -1,
            carried=served.turn,
            trial=served.trial,
            part_reason=served.reason,
            ends_session=served.request.ends_session and bool(served.session),
            truncated="" if answer.finish == "stop" else answer.finish or BROKEN_OFF,
        )

    def _redacted(self, served: InFlight, experience: Experience) -> Experience | None:
        """The redacted experience; None if the rules drop it."""
        tools = self._redactor.mask_json([*served.request.prompt.tools])
        texts = [self._redactor.mask(message.content) for message in experience.messages]
        # The text of all tokens is checked too: an earlier turn or a stop string may hold text that is in no message.
        spelled = self._redactor.mask(self.tokenizer.decode(experience.tokens.tolist()))[1]
        if not spelled and not any(found for _, found in texts) and tools == [*served.request.prompt.tools]:
            return experience
        if self._rules.action == "drop":
            self._drop("personal data")
            return None
        self._metrics.counter("redacted").inc()
        messages = tuple(
            replace(message, content=text) for message, (text, _) in zip(experience.messages, texts, strict=True)
        )
        chat = tuple(self._masked_message(message) for message in served.request.prompt.chat)
        prompt = Prompt(plain=messages[:-1], chat=chat, tools=tuple(tools) if isinstance(tools, list) else ())
        return self._spelled(experience, prompt, messages[-1].content, messages)

    def _masked_message(self, message: object) -> dict[str, object]:
        masked = self._redactor.mask_json(message)
        assert isinstance(masked, dict)
        return masked

    def _spelled(self, experience: Experience, prompt: Prompt, reply: str, messages: tuple[Message, ...]) -> Experience:
        """The experience with tokens of this text; an answer whose text did not change keeps its own."""
        start = experience.num_prompt
        own = experience.tokens[start:].tolist()
        tokens = render(prompt, self.tokenizer)
        if self.tokenizer.decode(own) == reply and not self._redactor.mask(reply)[1]:
            answer, logprobs, moved = own, experience.logprobs.tolist(), len(tokens) - start
            spans = [replace(s, start=s.start + moved, stop=s.stop + moved, ratio=False) for s in experience.spans]
        else:
            end = own[-1:] if not self.tokenizer.decode(own[-1:]) else []  # the token that ends a turn has no text
            answer = [*self.tokenizer.encode(reply), *end]
            logprobs = [0.0] * len(answer)
            whole = replace(experience.spans[-1], start=len(tokens), stop=len(tokens) + len(answer), ratio=False)
            spans = [whole] if answer else []
        return experience.with_bulk(tokens=[*tokens, *answer], logprobs=logprobs, messages=messages, spans=tuple(spans))

    def _drop(self, reason: str, count: int = 1) -> None:
        self._metrics.counter("not_recorded", reason=reason).inc(count)
