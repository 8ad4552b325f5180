"""Where a conversation goes on after what was sampled: the tokens the chat template adds, and no others.

Guarantee: nothing sampled is tokenized again; a template that does not extend what was sampled says so instead of
inventing tokens.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import msgspec


class Decoder(Protocol):
    """The part of a tokenizer that this needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens."""


class SampledTurn(msgspec.Struct, frozen=True):
    """One sampled turn. rendered: the template's tokens for its prompt. sampled: its tokens. content: their text.

    stopped: the last sampled token is a stop token.
    """

    rendered: Sequence[int]
    sampled: Sequence[int]
    content: str
    stopped: bool


def added_tokens(rendered: Sequence[int], last: SampledTurn, tokenizer: Decoder) -> list[int] | None:
    """Tokens the template adds after the sampled turn `last`; None where `rendered` does not extend it.

    The template's rendering of our reply need not be the tokens that were sampled (a text has many spellings), so its
    end is found by the stop token, or by the text where there is none, and the sampled spelling is kept.
    """
    num_prompt = len(last.rendered)
    if list(rendered[:num_prompt]) != list(last.rendered):
        return None
    rest, turn, content = list(rendered[num_prompt:]), list(last.sampled), last.content
    if last.stopped:
        if turn[-1] not in rest:
            return None
        end = rest.index(turn[-1])
        spelled = rest[:end] == turn[:-1] or tokenizer.decode(rest[:end]) == content
        return rest[end + 1 :] if spelled else None
    if rest[: len(turn)] == turn:
        return rest[len(turn) :]
    end = bisect_left(range(len(rest)), len(content), key=lambda stop: len(tokenizer.decode(rest[:stop])))
    return rest[end:] if tokenizer.decode(rest[:end]) == content else None
