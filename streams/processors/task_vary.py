"""vary: variations of a training task, written by templates or by a model behind an OpenAI-compatible endpoint.

Guarantee: the task itself is always kept, even if the model is away; a variation has the task's answer, names it as
its parent and gets the same id at a retry; a variation is never varied.
"""

import logging
import os
from collections.abc import Sequence

import httpx
import msgspec

from infra.chain.processor import processor
from infra.settings.outside import bounded_answer, checked_url, shared_tls
from schemas import Message, Task
from schemas.errors import ConfigError
from streams.scores.endpoint import ChatCompletion

logger = logging.getLogger(__name__)

QUESTION = "{question}"
INSTRUCTION = """\
Write the task below in other words. Keep every number, name and condition, so that its answer stays exactly the same. \
Reply with the new task alone.

{question}"""
MAX_ANSWER_BYTES = 256 * 1024


@processor(version=1, of="task")
class Vary(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `vary`. Only the last user message is varied.

    templates: texts with {question} in them, one variation each. url, model: of an endpoint that rewrites the question.
    number: rewritten versions of each. instruction: the request to the endpoint, with {question} in it. temperature: the
    endpoint samples with it. timeout_s: of one request. api_key_env: the environment variable with the endpoint's key.

    Example: Vary(templates=("Solve step by step: {question}",))
    """

    templates: tuple[str, ...] = ()
    url: str = ""
    model: str = ""
    number: int = 1
    instruction: str = INSTRUCTION
    temperature: float = 1.0
    timeout_s: float = 30.0
    api_key_env: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigError for a template without a place for the question, or a key that is not there."""
        for template in (*self.templates, self.instruction):
            if QUESTION not in template:
                raise ConfigError(f"vary: got the template {template!r}, expected {QUESTION} in it")
        if bool(self.url) != bool(self.model):
            raise ConfigError("vary: got one of url and model, expected both or neither")
        if self.url:
            try:
                checked_url(self.url)
            except ValueError as error:
                raise ConfigError(f"vary.url: {error}") from error
        if self.api_key_env and self.api_key_env not in os.environ:
            raise ConfigError(f"vary.api_key_env: the environment has no {self.api_key_env}")

    async def __call__(self, task: Task) -> list[Task]:
        """The task, and behind it its variations."""
        question = _question(task)
        if task.split != "train" or task.parent or not question:
            return [task]
        texts = [template.replace(QUESTION, question) for template in self.templates]
        if self.url:
            texts += await self._written(task.id, question)
        fresh = [text for text in dict.fromkeys(text.strip() for text in texts) if text and text != question]
        return [task, *(variation(task, text, index) for index, text in enumerate(fresh))]

    async def _written(self, id: str, question: str) -> list[str]:
        headers = {"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {}
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.instruction.replace(QUESTION, question)}],
            "n": self.number,
            "temperature": self.temperature,
        }
        try:
            async with httpx.AsyncClient(timeout=self.timeout_s, headers=headers, verify=shared_tls()) as client:
                url = f"{self.url.rstrip('/')}/chat/completions"
                response, content = await bounded_answer(client, "POST", url, MAX_ANSWER_BYTES, json=body)
            response.raise_for_status()
            choices = msgspec.json.decode(content, type=ChatCompletion).choices
            return [choice.message.content or "" for choice in choices]
        except (httpx.HTTPError, msgspec.MsgspecError, ValueError) as error:
            logger.warning("vary_failed task=%s error=%s: %s", id, type(error).__name__, error)
            return []


def variation(task: Task, text: str, index: int) -> Task:
    """The task with its last user message replaced."""
    last = _last_user(task.messages)
    messages = tuple(
        msgspec.structs.replace(message, content=text) if place == last else message
        for place, message in enumerate(task.messages)
    )
    return msgspec.structs.replace(task, id=f"{task.id}-v{index}", messages=messages, parent=task.id)


def _question(task: Task) -> str:
    last = _last_user(task.messages)
    return "" if last is None else task.messages[last].content


def _last_user(messages: Sequence[Message]) -> int | None:
    return next((place for place in reversed(range(len(messages))) if messages[place].role == "user"), None)
