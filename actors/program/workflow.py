"""Workflow of a program that knows a base URL and a key.

    task ─> program ─ Chat Completions, Responses, Messages ─> site ─> policy
              └── rewards, by name, of the whole or of a turn ─> scores

Ends: terminal with the last answer; truncated if that answer was cut off, or the program gave up at a full context; failed with
a cause: agent (it raised, crashed, or requested nothing), reward (its result cannot be read), timeout.
"""

import asyncio
import base64
from collections.abc import Callable
from typing import Any, Literal, cast

from actors.gateway.answering.parsing import AnswerParser, answer_parser
from actors.program.episode import ProgramEpisode
from actors.program.launch import AgentLoop, ProgramInput, Result, ask_service, call, finite, parse_result, run_command
from actors.program.site import MODEL, ProgramSite
from actors.rollout.session import Session
from actors.rollout.workflow import EpisodeFailed
from infra.model.model import Tokenizer
from infra.settings.config import Positive, Section, decode
from infra.settings.outside import checked_url, shared_tls
from infra.settings.plugin import load
from infra.store.images import ImageReader, images_of
from schemas import Message, Score, Task
from schemas.errors import ConfigError


class ProgramOptions(Section, frozen=True):
    """Options of the workflow Program: exactly one of use, command and url.

    The result of a program is what the function returns, the last line that the command prints, or the body of the service's
    answer: nothing, a number, or {"reward": 1.0, "rewards": {…}, "turns": [{"id": "…", "rewards": {…}}], "answer": "…", "end":
    "truncated"}.

    use: Function, as `module:name`, sync or async, with any of the parameters task, base_url, key and model. options: Options
    of the function. command: Command per episode, with the task as JSON on standard input and the variables OPENAI_BASE_URL,
    OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and HEADRACE_MODEL. environment: Further environment variables of the
    command. url: URL of a service that receives task, base_url, api_key and
    model. listen: Address, host:port, at which programs reach the policy. Anyone who reaches it with an episode's key can send
    requests; use another address than loopback only for a service on another machine. sampling: Source of temperature, top_p
    and seed: the "task", or the requests of the "program". at_once: Maximum concurrent requests of an episode; further requests
    are refused. requests: Maximum total requests of an episode; further requests are refused.

    Example: ProgramOptions(command=("node", "agent.mjs"))
    """

    use: str = ""
    options: dict[str, Any] = {}
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    url: str = ""
    listen: str = "127.0.0.1:0"
    sampling: Literal["task", "program"] = "task"
    at_once: Positive = 16
    requests: Positive = 512

    def __post_init__(self) -> None:
        given = [name for name in ("use", "command", "url") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"got {' and '.join(given) or 'none'} of use, command and url, expected one of them")
        if self.url:
            checked_url(self.url)


class Program:
    """Episode of a program that knows a base URL and a key. headrace trains on the completions that it requests."""

    def __init__(self, **options: object) -> None:
        """Finds the function at the start of the role rather than in its first episode. Raises ConfigError."""
        self._options = decode(options, ProgramOptions, "program")
        self._function = _function(self._options)
        self._agents = AgentLoop()
        self._site = ProgramSite(self._options.listen)
        self._parser: AnswerParser | None = None
        self._preparing = asyncio.Lock()
        self._tls = shared_tls() if self._options.url.startswith("https:") else None

    async def __call__(self, task: Task, session: Session) -> tuple[Score, ...]:
        """Play one episode."""
        tokenizer = cast(Tokenizer, session.tokenizer)
        options = self._options
        parser = await self._prepared(tokenizer)
        episode = ProgramEpisode(
            session, tokenizer, parser, at_once=options.at_once, requests=options.requests,
            own_sampling=options.sampling == "program",
        )  # fmt: skip
        shown = await asyncio.to_thread(given, task, session.images) if images_of(task.messages) else given(task)
        await self._site.start()
        self._site.open(episode)
        try:
            said = await self._run(ProgramInput(self._site.address, episode.key, MODEL, shown))
            result = parse_result(said)
        except EpisodeFailed:
            if episode.stopped is not None:
                raise episode.stopped from None
            if not (episode.is_full and session.num_sampled):
                raise
            session.finish("truncated", "context is full")
            return ()
        finally:
            self._site.close(episode)
        if episode.stopped is not None:
            raise episode.stopped
        if not session.num_sampled:
            raise EpisodeFailed("agent", "it ended without an answer of the policy")
        return _scored(result, episode, session)

    async def _prepared(self, tokenizer: Tokenizer) -> AnswerParser:
        async with self._preparing:
            if self._parser is None:
                parser = answer_parser(tokenizer)
                await asyncio.to_thread(parser.prepare)
                self._parser = parser
        return self._parser

    async def _run(self, access: ProgramInput) -> Any:
        if self._options.command:
            return await run_command(self._options.command, access, self._options.environment)
        if self._options.url:
            return await ask_service(self._options.url, access, self._tls)
        return await call(self._function, access, self._agents)


def _function(options: ProgramOptions) -> Callable[..., Any]:
    found = load(options.use, options.options, "program") if options.use else print
    if not callable(found):
        raise ConfigError(f"program.use: got {options.use}, expected a function")
    return cast(Callable[..., Any], found)


def given(task: Task, images: ImageReader | None = None) -> dict[str, Any]:
    """A task as a program gets it: without the answer, which is for the scores; with pictures as a chat has them. Raises
    BadImage, StoreError.
    """
    messages = [
        {"role": message.role, "content": _content(message, images) if message.images else message.content}
        for message in task.messages
    ]
    return {"id": task.id, "messages": messages, "meta": dict(task.meta)}


def _content(message: Message, images: ImageReader | None) -> list[dict[str, Any]]:
    if images is None:
        raise ValueError(f"messages: got {len(message.images)} images, expected none: this session reads no store")
    parts: list[dict[str, Any]] = []
    for image in message.images:
        data = base64.b64encode(images.data(image)).decode()
        parts.append({"type": "image_url", "image_url": {"url": f"data:{image.media_type};base64,{data}"}})
    return [*parts, {"type": "text", "text": message.content}]


def _scored(result: Result, episode: ProgramEpisode, session: Session) -> tuple[Score, ...]:
    scores = result.scores()
    for turn in result.turns:
        for name, value in turn.rewards.items():
            if not episode.score(turn.id, name, finite(name, value)):
                raise EpisodeFailed("reward", f"the program's result: turns: no answer has the id {turn.id!r}")
    if result.answer is not None:
        session.note("answer", result.answer)
    if result.end is not None:
        session.finish(result.end, "program" if result.end == "truncated" else "")
    return scores
