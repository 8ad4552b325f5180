"""teacher: a stronger model's log-probabilities of the tokens that the policy sampled, for the loss distill.

Guarantees: an experience leaves with a log-probability for each of its sampled tokens, with the name and version of the
teacher, or it is dropped with a reason; numbers are never guessed. They travel with the experience on the log, so a resume or
a replay never asks the teacher.
"""

import logging
from typing import Annotated

import msgspec
import numpy as np

from infra.chain.processor import Drop, processor
from infra.store.images import images_of
from schemas import Experience, Score
from schemas.errors import ConfigError
from schemas.wire.teacher import with_teacher_logprobs
from streams.scores.endpoint import Connection
from streams.spelling import TokenTexts

logger = logging.getLogger(__name__)

VERSION = 1
SCORE = "teacher"
BYTES_PER_TOKEN = 1024  # of a reply
OTHER_TEMPERATURE = "sampled at another temperature than 1"
OTHER_TOKENIZER = "teacher has another tokenizer"
PICTURES = "teacher reads text alone"
UNREADABLE = "teacher reply unreadable"
WRONG_LENGTH = "teacher answered for other tokens"


class _PromptLogprob(msgspec.Struct):
    logprob: Annotated[float, msgspec.Meta(le=1e-3)]
    decoded_token: str | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _PromptLogprob] | None]


class _PromptReply(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    system_fingerprint: str | None = None  # names the server's release and settings


@processor(version=VERSION)
class Teacher:
    """Adds the teacher's log-probabilities of the sampled tokens, and the score `teacher`, their mean minus the policy's.

    Eval answers, demonstrations, preferences and answers without importance ratios pass: no loss needs a teacher for them. See
    [verify.teacher].
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        api_key_env: str = "",
        deadline_s: float = 60.0,
        attempts: int = 4,
        policy: str = "",
    ) -> None:
        """policy: folder or name of the policy's model, whose tokenizer the teacher must have."""
        if not policy:
            raise ConfigError("verify.teacher: needs policy.model, whose tokenizer is compared with the teacher's")
        self.url, self.model, self.deadline_s = url, model, deadline_s
        self._connection = Connection(
            "teacher", url, model, key_env=api_key_env, deadline_s=deadline_s, attempts=attempts
        )
        self._tokenizer = TokenTexts(policy)

    async def __call__(self, experience: Experience) -> Experience | Drop:
        """Ask the teacher about one experience."""
        if experience.suite or experience.is_given or not any(span.ratio for span in experience.spans):
            return experience
        if any(span.ratio and span.temperature != 1.0 for span in experience.spans):
            return Drop(OTHER_TEMPERATURE, "endpoints tell log-probabilities of a prompt at temperature 1 alone")
        if images_of(experience.messages):
            return Drop(PICTURES, f"{len(images_of(experience.messages))} images")
        tokens = experience.tokens[: experience.spans[-1].stop].tolist()
        # store: a gateway of headrace records no answer to it.
        body = {
            "model": self.model, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "store": False,
        }  # fmt: skip
        posted = await self._connection.post("/completions", body, (len(tokens) + 64) * BYTES_PER_TOKEN)
        if posted.content is None:
            return Drop(posted.reason, f"{len(tokens)} tokens, asked for {self.deadline_s:g} s at most")
        try:
            reply = msgspec.json.decode(posted.content, type=_PromptReply)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            return Drop(UNREADABLE, f"{error}: does the endpoint know prompt_logprobs?")
        return self._taught(experience, tokens, reply)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._connection.aclose()

    def _taught(self, experience: Experience, tokens: list[int], reply: _PromptReply) -> Experience | Drop:
        places = [place for span in experience.spans for place in range(span.start, span.stop)]
        told = reply.choices[0].prompt_logprobs
        if len(told) != len(tokens):
            return Drop(WRONG_LENGTH, f"got {len(told)} log-probabilities of a prompt of {len(tokens)} tokens")
        found: list[_PromptLogprob] = []
        for place in places:
            logprob = (told[place] or {}).get(tokens[place])
            if logprob is None:
                return Drop(WRONG_LENGTH, f"got none for token {tokens[place]} at {place}")
            found.append(logprob)
        if self._is_other_tokenizer([tokens[place] for place in places], found):
            return Drop(
                OTHER_TOKENIZER, "most tokens have another text there: expected a model with the policy's tokenizer"
            )
        teacher = np.minimum(np.array([logprob.logprob for logprob in found], np.float32), 0)
        mean = float(np.mean(teacher - experience.logprobs, dtype=np.float64))
        version = f"{VERSION}+{self.model}" + (f"@{reply.system_fingerprint}" if reply.system_fingerprint else "")
        others = tuple(score for score in experience.scores if score.name != SCORE)
        scores = (*others, Score(name=SCORE, value=mean, version=version))
        return msgspec.structs.replace(with_teacher_logprobs(experience, teacher), scores=scores)

    def _is_other_tokenizer(self, tokens: list[int], found: list[_PromptLogprob]) -> bool:
        """True if most tokens that both sides spell in ASCII have two texts: parts of a character are spelled in many ways."""
        compared = different = 0
        for text, logprob in zip(self._tokenizer.texts(tokens), found, strict=True):
            own, other = text.strip(), (logprob.decoded_token or "").strip()
            if own and other and own.isascii() and other.isascii():
                compared += 1
                different += own != other
        return different > compared / 2
