"""redact: personal data and secrets in the text. Off by default here: where data comes from outside, the gateway
redacts before the first write.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from infra.chain.processor import Drop, processor
from infra.chain.redact import Kind, Redactor
from schemas import Experience


@processor(version=3)
def redact(
    experience: Experience,
    *,
    kinds: Sequence[Kind],
    patterns: Mapping[str, str],
    action: Literal["drop", "mask"],
) -> Experience | Drop:
    """Drop an experience whose text holds such data, or mask the text as `[email]`.

    mask hides the text that people and scores read; the token ids stay as sampled, so what is learned does not change.
    A match cannot be interrupted: bound your own patterns' repetitions. It is at most `infra.chain.redact.REACH` long.
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
