"""Parts of an experience besides tokens and text: spans, scores, and people's edits of the answer."""

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta as Bounds

from schemas.fields import Count, Finite, Id

HISTORY_REWRITTEN = "history rewritten"  # why a conversation does not go on from what was sampled

Version = Annotated[int, Bounds(ge=-1)]


class Span(msgspec.Struct, array_like=True, frozen=True):
    """A run of sampled tokens, start to stop (exclusive) in `Experience.tokens`, by one policy at one temperature.

    start, stop: indexes of the first token and of the one behind the last. temperature: 0 is greedy.
    version: -1 where no policy of ours sampled them (demonstrations). ratio: the recorded logprobs are the policy's own
    at that temperature, so an importance ratio exists. kv: where the engine kept keys and values over reloads, the version of
    the oldest that they may have been sampled with; -1 where all are those of `version`.

    Example: Span(start=6, stop=11, version=12)
    """

    start: Count
    stop: Count
    version: Version
    temperature: Annotated[float, Bounds(ge=0, le=1e6)] = 1.0
    ratio: bool = True
    kv: Version = -1


class Score(msgspec.Struct, array_like=True, frozen=True):
    """One named verdict. name: of the [[score]] or the feedback source. value: mostly 0 to 1. at: index of the token it
    judges, None for the whole. version: of what judged, with the model behind "+" where there was one. input: hash of what
    was judged, with that of the code behind ":", "" where it is not kept. cost_usd: None where nothing is charged.

    Example: Score(name="exact", value=1.0)
    """

    name: Annotated[str, Bounds(min_length=1, max_length=256)]
    value: Finite
    at: Count | None = None
    version: str = ""
    input: str = ""
    cost_usd: Finite | None = None


class Stretch(msgspec.Struct, array_like=True, frozen=True):
    """The advantage of a run of tokens, from the stop of the one before it (or the first token) to its own.

    stop: index of the token behind the last. advantage: of each token of the run.

    Example: Stretch(stop=11, advantage=0.93)
    """

    stop: Count
    advantage: Finite


class Join(msgspec.Struct, array_like=True, frozen=True):
    """Turns of a session that are trained together. name: group of the first of its turns. more: how many of them
    follow it into `buffer`.

    Example: Join(name="mddrffqvmjcncqrrjhvnrntq.7-3", more=18)
    """

    name: Id
    more: Count = 0


class Edit(msgspec.Struct, array_like=True, frozen=True):
    """People's corrections of an answer. text: the newest correction, None where all were taken back. count: how often
    one was made or taken back.

    Example: Edit(text="281", count=1)
    """

    text: str | None = None
    count: Count = 0


def num_sampled(spans: Sequence[Span], num_tokens: int) -> int:
    """Tokens in spans, once these are known to be sorted, not empty, not overlapping and within the tokens."""
    end = sampled = 0
    for span in spans:
        start, stop = span.start, span.stop
        if not end <= start < stop <= num_tokens:
            raise ValueError(
                f"spans: got {start} to {stop}, expected a non-empty run within {end} and {num_tokens} (sorted, without"
                " overlap, inside the tokens)"
            )
        end = stop
        sampled += stop - start
    return sampled
