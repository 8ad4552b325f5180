"""Tokens of one request as they are sampled, and the version that sampled each."""

import msgspec

from actors.engines.engine import Chunk, Completion, Sampling
from schemas import Span


class Trace(msgspec.Struct):
    """Grows by one token at a time; a change of version begins a new span."""

    sampling: Sampling
    tokens: list[int] = []
    logprobs: list[float] = []
    starts: list[tuple[int, int]] = []  # (version, index of its first token)
    taken: int = 0

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
            spans=spans(self.starts, len(self.tokens), self.sampling),
            stopped=bool(self.tokens) and self.tokens[-1] in self.sampling.stop,
        )

    def take_chunks(self) -> list[Chunk]:
        """What was recorded since the last call, one chunk per version."""
        begin, self.taken = self.taken, len(self.tokens)
        runs = spans(self.starts, len(self.tokens), self.sampling)
        cuts = [(max(begin, run.start), run.stop, run.version) for run in runs if run.stop > begin]
        return [
            Chunk(tuple(self.tokens[start:stop]), tuple(self.logprobs[start:stop]), version)
            for start, stop, version in cuts
        ]


def spans(starts: list[tuple[int, int]], num_tokens: int, sampling: Sampling) -> tuple[Span, ...]:
    """Runs of one version each. starts: (version, index of its first token), ascending.

    Greedy tokens have no ratio: their recorded logprob is the policy's at temperature 1, but they were not drawn.
    Neither have those of a truncated distribution, or of one that a schema masks.
    """
    temperature, ratio = sampling.temperature, sampling.has_ratio
    stops = [start for _, start in starts[1:]] + [num_tokens]
    return tuple(
        Span(start, stop, version, temperature=temperature, ratio=ratio)
        for (version, start), stop in zip(starts, stops, strict=True)
        if stop > start
    )
