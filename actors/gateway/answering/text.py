"""Text of tokens for clients: whole characters, without stop strings. Pure.

Guarantee: the joined pieces are the text of all tokens, up to a stop string. A character with bytes in several tokens is in a
single piece. A piece that may start a stop string is held until this is decided.
"""

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"  # decoders write it for bytes that are no character (yet)
THINK, THOUGHT = "<think>", "</think>"  # as Qwen3, DeepSeek-R1 and others write it
MAX_HELD_TOKENS = 16  # a character has at most four bytes: longer runs are no character, and are let go


class Detokenizer:
    """Text of a growing token sequence, in whole characters.

    Decoding starts a few tokens back, since how a token reads can depend on the one before it (leading spaces).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context = 0  # decoding starts here
        self._num_streamed = 0  # tokens before it are streamed

    def add(self, tokens: Sequence[int]) -> str:
        """The text that can be streamed after these tokens."""
        return "".join([self._add(token) for token in tokens])  # one by one: chunks need not end where characters do

    def _add(self, token: int) -> str:
        self._tokens.append(token)
        before, after = self._texts()
        if after.endswith(BROKEN) and len(self._tokens) - self._num_streamed <= MAX_HELD_TOKENS:
            return ""
        self._context, self._num_streamed = self._num_streamed, len(self._tokens)
        return after[len(before) :]

    def flush(self) -> str:
        """Return the text that was held back."""
        before, after = self._texts()
        self._context, self._num_streamed = self._num_streamed, len(self._tokens)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._tokens[self._context : self._num_streamed]), self._decode(
            self._tokens[self._context :]
        )


class StopStrings:
    """Cuts a growing text before the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """Add a piece; return the text that can be streamed."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._held + piece
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :] if held else ""
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the text that was held back: no stop string followed."""
        held, self._held = self._held, ""
        return held


class ThoughtSplitter:
    """Separates the thought of an answer, between THINK and THOUGHT at its very beginning, from the words.

    The parts joined, with THINK before and THOUGHT behind the thought, are the answer. thinks: True if the prompt has opened
    the thought, None if that is not known yet.
    """

    def __init__(self, thinks: bool | None = None) -> None:
        self._held = ""
        self.thinks = thinks

    def add(self, piece: str) -> tuple[str, str]:
        """The new thought and the new words, as far as they can be separated."""
        text, self._held = self._held + piece, ""
        if self.thinks is None and THINK.startswith(text[: len(THINK)]) and len(text) < len(THINK):
            self._held = text
            return "", ""
        if self.thinks is None:
            self.thinks = text.startswith(THINK)
            text = text.removeprefix(THINK)
        if not self.thinks:
            return "", text
        thought, mark, said = text.partition(THOUGHT)
        if mark:
            self.thinks = False
            return thought, said
        held = _overlap(text, THOUGHT)
        self._held = text[len(text) - held :] if held else ""
        return text[: len(text) - held], ""

    def flush(self) -> tuple[str, str]:
        """Return the text that was held back: no mark followed."""
        held, self._held = self._held, ""
        return (held, "") if self.thinks else ("", held)


def split_thought(text: str, splitter: ThoughtSplitter) -> tuple[str, str]:
    (thought, said), (more_thought, more_said) = splitter.add(text), splitter.flush()
    return thought + more_thought, said + more_said


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`.

    >>> _overlap("one STO", "STOP")
    3
    """
    tail = text[max(0, len(text) - len(stop) + 1) :]
    start = tail.find(stop[0])
    while start >= 0 and not stop.startswith(tail[start:]):
        start = tail.find(stop[0], start + 1)
    return len(tail) - start if start >= 0 else 0
