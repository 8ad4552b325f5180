"""Tokens of one request as they are sampled, and the version that sampled each."""

import hashlib
from collections.abc import Sequence

import msgspec

from actors.engines.engine import Chunk, Completion, Sampling
from infra.model.vision import Prepared, Vision
from infra.store.images import Pixels
from schemas import Span


class RequestImages:
    """The images of one prompt, equal where their pixels are."""

    def __init__(self, images: Sequence[Pixels] = ()) -> None:
        self.images = tuple(images)
        self._prepared: tuple[Prepared, ...] | None = None
        self._digest = tuple(
            (image.shape, hashlib.blake2b(image.tobytes(), digest_size=16).digest()) for image in images
        )

    def prepared(self, vision: Vision) -> tuple[Prepared, ...]:
        """Inputs of the vision tower, computed once."""
        if self._prepared is None:
            self._prepared = tuple(vision.prepare(image) for image in self.images)
        return self._prepared

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestImages) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


class Trace(msgspec.Struct):
    """Grows by one token at a time; a change of version, or of the age of keys and values, begins a new span.

    sampling: of all its tokens. tokens: sampled ones. logprobs: one for each. runs: first token, version and age of keys and
    values (as in Span) of each. taken: how many tokens were handed on.
    """

    sampling: Sampling
    tokens: list[int] = []
    logprobs: list[float] = []
    runs: list[tuple[int, int, int]] = []
    taken: int = 0

    def add(self, token: int, logprob: float, version: int, kv: int = -1) -> bool:
        """Record a token; True where it ends the sequence. kv: oldest version of its keys and values, -1 for `version`."""
        run = (version, -1 if kv == version else kv)
        if not self.runs or self.runs[-1][1:] != run:
            self.runs.append((len(self.tokens), *run))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return token in self.sampling.stop or len(self.tokens) >= self.sampling.max_tokens

    def completion(self) -> Completion:
        """The recorded tokens as a completion."""
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=self.spans(),
            stopped=bool(self.tokens) and self.tokens[-1] in self.sampling.stop,
        )

    def take_chunks(self) -> list[Chunk]:
        """Tokens recorded since the last call, one chunk per version."""
        before, self.taken = self.taken, len(self.tokens)
        cuts = [(max(before, run.start), run) for run in self.spans() if run.stop > before]
        return [
            Chunk(tuple(self.tokens[start : run.stop]), tuple(self.logprobs[start : run.stop]), run.version, run.kv)
            for start, run in cuts
        ]

    def spans(self) -> tuple[Span, ...]:
        """Greedy tokens have no ratio: their recorded logprob is the policy's at temperature 1, but they were not drawn.
        Tokens of a truncated distribution, or of a distribution that a schema masks, have none either.
        """
        temperature, ratio = self.sampling.temperature, self.sampling.has_ratio
        stops = [at for at, *_ in self.runs[1:]] + [len(self.tokens)]
        return tuple(
            Span(at, stop, version, temperature=temperature, ratio=ratio, kv=kv)
            for (at, version, kv), stop in zip(self.runs, stops, strict=bool(self.runs))
        )
