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
from infra.settings.outside import bounded_answer, shared_tls
from schemas import Message, Task
from schemas.errors import ConfigError
from streams.config import QUESTION, VaryConfig
from streams.scores.endpoint import ChatCompletion

logger = logging.getLogger(__name__)

INSTRUCTION = """\
Write the task below in other words. Keep every number, name and condition, so that its answer stays exactly the same. \
Reply with the new task alone.

{question}"""
MAX_ANSWER_BYTES = 256 * 1024


@processor(version=1, of="task")
class Vary(VaryConfig, frozen=True):
    """Variations of a training task; only its last user message is varied. The options are those of [tasks.vary]."""

    def __post_init__(self) -> None:
        try:
            VaryConfig.__post_init__(self)
        except ValueError as error:
            raise ConfigError(f"vary: {error}") from error
        if self.api_key_env and self.api_key_env not in os.environ:
            raise ConfigError(f"vary.api_key_env: the environment has no {self.api_key_env}")

    async def __call__(self, task: Task) -> list[Task]:
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
            "messages": [{"role": "user", "content": INSTRUCTION.replace(QUESTION, question)}],
            "n": self.number,
            "temperature": 1.0,
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
