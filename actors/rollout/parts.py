"""The token sequences of one episode, and which of them a conversation continues.

Guarantee: a turn continues the sequence that it extends. A turn that extends no sequence, or a sequence that another turn is
extending, starts a new sequence with a `reason`. Each sampled token is in one sequence, once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from actors.engines.engine import Completion
from actors.rollout.continuation import Decoder, SampledTurn, added_tokens, words
from schemas import Message, Score, Span
from schemas.fields import HISTORY_REWRITTEN

Conversation = tuple[Message, ...]
# Tokens that the template writes behind a part's turn, by the part's number of messages; None if they cannot be found.
Follow = Callable[[SampledTurn, int], list[int] | None]

TEMPLATE_DIFFERS = "the template does not extend earlier turns"
AT_ONCE = "asked while another turn of it was sampled"
CUT = "a stop string cut the turn before"
OTHER = "another conversation"


class GrowingPart(msgspec.Struct):
    """One token sequence being grown.

    tokens: prompt and answers so far. rendered: the template's own tokens for the last turn's prompt. turn: tokens of the last
    answer. said: its text. conversation: of the last turn, its answer included. stopped: whether a stop token ended the last
    turn. reason: why it does not go on in a part before. sampling: a turn of it is being sampled. cut: its text is shorter
    than its tokens. tools: digest of the tools in the last turn's request.
    """

    tokens: list[int] = []
    rendered: Sequence[int] = ()
    turn: tuple[int, ...] = ()
    said: str = ""
    logprobs: list[float] = []
    spans: list[Span] = []
    conversation: Conversation = ()
    stopped: bool = False
    scores: list[Score] = []
    reason: str = ""
    sampling: bool = False
    cut: bool = False
    tools: bytes = b""

    def add(
        self,
        prompt: Sequence[int],
        rendered: Sequence[int],
        completion: Completion,
        conversation: Conversation,
        *,
        forced: Sequence[int] = (),
        said: str | None = None,
    ) -> None:
        """Take a turn. forced: the end of the prompt, with which the answer had to begin. said: the answer's text, where the
        conversation spells it otherwise.
        """
        start = len(prompt)
        for span in completion.spans:
            self.spans.append(msgspec.structs.replace(span, start=start + span.start, stop=start + span.stop))
        self.tokens = [*prompt, *completion.tokens]
        self.logprobs.extend(completion.logprobs)
        self.rendered, self.turn = rendered, (*forced, *completion.tokens)
        self.conversation, self.stopped = conversation, completion.stopped
        self.said = conversation[-1].content if said is None else said


class Found(NamedTuple):
    """The place of a turn. part: None for a new one. prompt: tokens. reason: why a new part begins."""

    part: GrowingPart | None
    prompt: list[int]
    reason: str


class Parts:
    """The parts of one episode. all: oldest first. last: the part with the newest turn."""

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self.all: list[GrowingPart] = []
        self.last: GrowingPart | None = None

    def find(self, conversation: Conversation, rendered: Sequence[int], follow: Follow) -> Found:
        """The part that a conversation continues, the newest first. rendered: the conversation as the template writes it."""
        reason = ""
        for part in reversed(self.all):
            sampling = part.sampling  # read first: a turn that ends meanwhile, in another thread, changes the rest
            known = len(part.conversation)
            if len(conversation) <= known or not _same(conversation[:known], part.conversation):
                continue
            if sampling or part.cut:
                reason = reason or (AT_ONCE if sampling else CUT)
                continue
            turn = SampledTurn(part.rendered, part.turn, part.said, part.stopped, part.tools)
            tail = added_tokens(rendered, turn, self._tokenizer)
            tail = follow(turn, known) if tail is None else tail
            if tail is not None:
                return Found(part, part.tokens + tail, "")
            reason = reason or TEMPLATE_DIFFERS
        if self.all and not reason:
            begun = any(part.conversation[:1] == conversation[:1] for part in self.all)
            reason = HISTORY_REWRITTEN if begun else OTHER
        return Found(None, list(rendered), reason)

    def begin(self, reason: str) -> GrowingPart:
        self.all.append(GrowingPart(reason=reason))
        return self.all[-1]


def _same(given: Conversation, known: Conversation) -> bool:
    """True for the same conversation; answers may come back without their thoughts and surrounding blanks."""
    return all(
        left == other or (left.role == other.role == "assistant" and words(left.content) == words(other.content))
        for left, other in zip(given, known, strict=True)
    )
