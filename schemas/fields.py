"""Types of fields of records: bounded numbers, names and lists, the words that a field may hold, and parts of an experience."""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta as Bounds

# Every list has a bound, since a decoder makes room for as many items as a frame of five bytes may announce.
_MAX_FLOAT = 1.7976931348623157e308
Finite = Annotated[float, Bounds(ge=-_MAX_FLOAT, le=_MAX_FLOAT)]
Weight = Annotated[float, Bounds(ge=0, le=_MAX_FLOAT)]
Id = Annotated[str, Bounds(min_length=1, max_length=1024)]
Count = Annotated[int, Bounds(ge=0)]
Number = Annotated[int, Bounds(ge=-1)]  # -1 for none
Ids = Annotated[tuple[Id, ...], Bounds(max_length=65_536)]
Counts = Annotated[dict[str, Count], Bounds(max_length=65_536)]
Numbers = Annotated[dict[str, float], Bounds(max_length=4096)]  # measurements: infinite where the measured quantity is

Lane = Literal["usual", "live", "expert", "synthetic", "human"]
LANES: tuple[Lane, ...] = get_args(Lane)
Kind = Literal["answer", "demonstration", "chosen", "rejected", "withdrawal"]
End = Literal["terminal", "truncated", "failed"]
Outcome = Literal["buffered", "dropped", "superseded"]
Channel = Literal["candidate", "canary", "stable"]
PolicyEventKind = Literal["lease", "published", "promoted", "pinned", "rolled_back", "orphaned", "held"]
DirectiveKind = Literal["lease", "drain", "pause", "continue", "forget", "open"]
# State of a role: it gets ready, works, or ended in order.
Life = Literal["starting", "working", "ended"]
# State of the master: issuing has not begun, continues, or ended with groups outstanding; an operator's drain is complete;
# the last evals run; the run is over; an operator pauses learning.
MasterPhase = Literal["warming up", "issuing", "draining", "drained", "evaluating", "done", "paused"]
FeedbackKind = Literal["value", "label", "correction", "retraction"]
CANARY_MISSING = "canary_missing_s"  # gauge of Progress: for how long no canary was heard of, 0 where that is no alarm
VERSION_PASSED = "version passed"  # reason of a closure: no engine can answer this eval any more
HISTORY_REWRITTEN = "history rewritten"  # why a conversation does not continue from the sampled tokens
GROUP_OVER = "group over"  # reason of the drop markers of episodes that still ran or waited
# Values of the step before a version that the version's event keeps for as long as the log: values with these names, and
# values of each lane with these endings. Reports, which have all values, are kept for a day.
KEPT_FIGURES = (
    "reward_mean", "loss", "grad_norm", "/staleness_mean", "/entropy", "/k3", "/kl_reference", "/clip_positive",
    "/clip_negative", "/ess",
)  # fmt: skip
Meta = Annotated[dict[str, str | int | Finite | bool | None], Bounds(max_length=1024)]


class Struct(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all records: immutable, keyword-only, absent fields are defaults."""


def is_kept_figure(name: str) -> bool:
    """True if the event of a version keeps this value.

    >>> is_kept_figure("live/entropy"), is_kept_figure("live/mismatch_k3"), is_kept_figure("loss")
    (True, False, True)
    """
    return name in KEPT_FIGURES or f"/{name.partition('/')[2]}" in KEPT_FIGURES


class Span(msgspec.Struct, array_like=True, frozen=True):
    """Sampled tokens of the same policy version and temperature.

    start: index of the first token in `Experience.tokens`. stop: index after the last token. version: policy version, -1 for
    tokens that no policy sampled (demonstrations). temperature: sampling temperature; 0 is greedy. ratio: True if the recorded
    logprobs are the policy's own at that temperature, so that an importance ratio exists. kv: oldest version of the KV cache
    with which the tokens were sampled, if the engine kept it over reloads; -1 if it is `version`.
    """

    start: Count
    stop: Count
    version: Number
    temperature: Annotated[float, Bounds(ge=0, le=1e6)] = 1.0
    ratio: bool = True
    kv: Number = -1


class Score(msgspec.Struct, array_like=True, frozen=True):
    """A named verdict. name: name of the [[score]] table or feedback source. value: value, usually 0 to 1. at: index of the
    judged token, None for the whole answer. version: version of the score, with "+" and the judge's model if there is one.
    input: hash of the judged input, "" if not kept.
    """

    name: Annotated[str, Bounds(min_length=1, max_length=256)]
    value: Finite
    at: Count | None = None
    version: str = ""
    input: str = ""


class Stretch(msgspec.Struct, array_like=True, frozen=True):
    """The advantage of a run of tokens, from the stop of the one before it (or the first token) to its own.

    stop: index of the token behind the last. advantage: of each token of the run.
    """

    stop: Count
    advantage: Finite


class Join(msgspec.Struct, array_like=True, frozen=True):
    """Turns of a session that are trained together. name: group of the first of its turns. more: how many of them
    follow it into `buffer`.
    """

    name: Id
    more: Count = 0


class Edit(msgspec.Struct, array_like=True, frozen=True):
    """People's corrections of an answer. text: the newest correction, None where all were taken back. count: how often
    one was made or taken back.
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
