"""Tokens of one request as they are sampled, and the version that sampled each."""

import msgspec

from actors.engine import Completion, Sampling
from schemas import Span


class Trace(msgspec.Struct):
    """Grows by one token at a time; a change of version begins a new span."""

    sampling: Sampling
    tokens: list[int] = []
    logprobs: list[float] = []
    starts: list[tuple[int, int]] = []  # (version, index of its first token)

    def add(self, token: int, logprob: float, version: int) -> bool:
        """Record a token; True where it ends the sequence."""
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, len(self.tokens)))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return token in self.sampling.stop or len(self.tokens) >= self.sampling.max_tokens

    def completion(self) -> Completion:
        """What was recorded."""
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=spans(self.starts, len(self.tokens), self.sampling.temperature),
            stopped=bool(self.tokens) and self.tokens[-1] in self.sampling.stop,
        )


def spans(starts: list[tuple[int, int]], num_tokens: int, temperature: float) -> tuple[Span, ...]:
    """Runs of one version each. starts: (version, index of its first token), ascending.

    Greedy tokens have no ratio: their recorded logprob is the policy's at temperature 1, but they were not drawn.
    """
    stops = [start for _, start in starts[1:]] + [num_tokens]
    return tuple(
        Span(start, stop, version, temperature=temperature, ratio=temperature > 0)
        for (version, start), stop in zip(starts, stops, strict=True)
        if stop > start
    )
