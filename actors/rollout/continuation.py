"""Continuation of a conversation after a sampled answer: the tokens that the chat template adds, and no others.

Guarantee: sampled tokens are never tokenized again. They stay unchanged even if the template spells them differently or leaves
thoughts out. If the template does not define the tokens after an answer, no tokens are invented.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

import msgspec

MARK = "Understood: 7413."  # an answer that is easy to find in a template's output
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
T = TypeVar("T")


class Decoder(Protocol):
    """The part of a tokenizer that this needs."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the tokens."""


class SampledTurn(msgspec.Struct, frozen=True):
    """One sampled turn. rendered: the template's tokens for its prompt. sampled: its tokens. content: their text.

    stopped: the last sampled token is a stop token. tools: digest of the tools in its request.
    """

    rendered: Sequence[int]
    sampled: Sequence[int]
    content: str
    stopped: bool
    tools: bytes = b""


def words(answer: str) -> str:
    """The text of an answer without the thought before it and the blanks around it, as clients send answers back.

    >>> words("<think>\\nA greeting.\\n</think>\\n\\nHello.\\n")
    'Hello.'
    """
    thought = _THOUGHT.match(answer)
    return (answer[thought.end() :] if thought else answer).strip()


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


def following_tokens(
    render: Callable[[list[T]], list[int]],
    short: Sequence[T],
    new: Sequence[T],
    last: SampledTurn,
    *,
    stops: Collection[int],
    decode: Callable[[Sequence[int]], str],
) -> list[int] | None:
    """Tokens the template writes between the answer `last` and the next answer, even if it rewrites `last`; None if the tokens
    cannot be found.

    render: a conversation as the template writes it, ready for the next answer. short: a question, and an answer that says
    MARK. new: the messages behind the answer. stops: tokens that end an answer. The search begins where the answer of the
    short conversation ends: the tokens behind it are the same behind every answer.
    """
    opening, whole = render([*short[:-1]]), render([*short, *new])
    start = next((at for at, (a, b) in enumerate(zip(opening, whole, strict=False)) if a != b), len(opening))
    ends = {last.sampled[-1]} if last.stopped else stops
    end = next((at for at in range(start, len(whole)) if whole[at] in ends), None)
    if end is None or MARK not in decode(whole[start:end]) or MARK in decode(whole[end:]):
        return None
    return whole[end + 1 :] if last.stopped else whole[end:]
