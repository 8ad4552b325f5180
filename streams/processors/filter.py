"""Filter of answers by length, repetition and truncation."""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from infra.chain.processor import Drop, Memory, processor
from infra.chain.redact import Kind, Redactor
from schemas import BadFrame, Experience

WINDOW = 16
MIN_LOOP_TOKENS = 64
MAX_LOOKED_AT = 65_536  # tokens, from the end: a loop reaches the end


@processor(version=1, inline=True)
def filter(
    experience: Experience,
    *,
    min_tokens: int,
    max_tokens: int,
    max_repetition: float,
    truncated: Literal["keep", "drop"],
) -> Experience | Drop:
    """Drop answers that are too short, too long, looping or cut off; 0 is no limit. Evals and demonstrations pass."""
    if experience.suite or experience.is_given:
        return experience
    num_sampled = experience.num_sampled
    if num_sampled < min_tokens:
        return Drop("too short", f"{num_sampled} tokens, expected {min_tokens} or more")
    if max_tokens and num_sampled > max_tokens:
        return Drop("too long", f"{num_sampled} tokens, expected at most {max_tokens}")
    if truncated == "drop" and experience.end == "truncated":
        return Drop("truncated", f"cut off after {num_sampled} tokens")
    if max_repetition < 1 and num_sampled >= MIN_LOOP_TOKENS:
        sampled = np.concatenate([experience.tokens[span.start : span.stop] for span in experience.spans])
        share = repetition(sampled[-MAX_LOOKED_AT:])
        if share > max_repetition:
            return Drop("repetition", f"{share:.2f} of the {WINDOW}-token windows repeat, expected {max_repetition:g}")
    return experience


def repetition(tokens: npt.NDArray[np.uint32]) -> float:
    """Share of 16-token windows that occurred before in `tokens`; 0 for fewer than 17 tokens."""
    if len(tokens) <= WINDOW:
        return 0.0
    # A polynomial hash modulo 2**64: equal windows are equal, and 65,536 of them collide once in 10**10 such answers.
    hashes = tokens.astype(np.uint64)
    width = 1
    while width < WINDOW:  # a window is two of half its width
        hashes = hashes[:-width] + np.uint64(pow(0x9E3779B97F4A7C15, width, 2**64)) * hashes[width:]
        width *= 2
    hashes.sort()  # counting them so takes a fraction of np.unique's time
    return 1.0 - (1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))) / len(hashes)


@processor(version=1, inline=True)
def validate(experience: Experience) -> Experience | Drop:
    """Decode and check tokens, logprobs and messages; answers to evals may be empty or failed, since they are counted.

    A response of nothing but the end token is an answer like any other; "empty response" means nothing was sampled.
    """
    try:
        experience.check_bulk()
    except BadFrame as error:
        return Drop(experience.lost or "bad frame", str(error))
    if experience.suite:
        return experience
    if experience.end == "failed":
        return Drop("episode failed", experience.failure)
    if experience.num_sampled == 0:
        return Drop("empty response", "no sampled tokens")
    return experience


DUPLICATE = "duplicate"


def dedupe_key(experience: Experience) -> str:
    return f"{experience.id}/{experience.revision}" if experience.revision else experience.id


@processor(version=1, memory=65_536, inline=True)
def dedupe(experience: Experience, *, memory: Memory, record_offset: int) -> Experience | Drop:
    """Drop an experience that came before in another record; the same record again (a retry) is not a duplicate of itself.

    A duplicate needs no drop marker: its first delivery has completed its place in the group.
    """
    key = dedupe_key(experience)
    if key not in memory:
        memory.set(key, record_offset)
        return experience
    if record_offset >= 0 and memory.get(key) == record_offset:
        return experience
    return Drop(DUPLICATE, f"{experience.id} came before")


@processor(version=3)
def redact(
    experience: Experience, *, kinds: Sequence[Kind], patterns: Mapping[str, str], action: Literal["drop", "mask"]
) -> Experience | Drop:
    """Drop an experience with personal data, or mask its text as `[email]`.

    "mask" hides the text from people and scores; the token ids stay as sampled, so training does not change. A match cannot be
    interrupted: bound the repetitions of your own patterns. A match has at most `infra.chain.redact.REACH` characters.
    """
    redactor = Redactor(kinds, patterns)
    messages = []
    found: set[str] = set()
    for message in experience.messages:
        text, kinds_found = redactor.mask(message.content)
        found |= kinds_found
        messages.append(msgspec.structs.replace(message, content=text) if kinds_found else message)
    if not found:
        return experience
    if action == "drop":
        return Drop("personal data", ", ".join(sorted(found)))
    return experience.with_bulk(messages=tuple(messages))
