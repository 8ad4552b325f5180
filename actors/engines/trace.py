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


class Start(msgspec.Struct, frozen=True):
    """The start of a run of tokens. version: policy that sampled it. at: index of its first token. kv: as in Span."""

    version: int
    at: int
    kv: int = -1


class Trace(msgspec.Struct):
    """Grows by one token at a time; a change of version, or of the age of keys and values, begins a new span.

    sampling: of all its tokens. tokens: sampled ones. logprobs: one for each. starts: of runs, ascending. taken: how
    many tokens were handed on.
    """

    sampling: Sampling
    tokens: list[int] = []
    logprobs: list[float] = []
    starts: list[Start] = []
    taken: int = 0

    def add(self, token: int, logprob: float, version: int, kv: int = -1) -> bool:
        """Record a token; True where it ends the sequence. kv: oldest version of its keys and values, -1 for `version`."""
        begin(self.starts, version, len(self.tokens), kv)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return token in self.sampling.stop or len(self.tokens) >= self.sampling.max_tokens

    def completion(self) -> Completion:
        """The recorded tokens as a completion."""
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=spans(self.starts, len(self.tokens), self.sampling),
            stopped=bool(self.tokens) and self.tokens[-1] in self.sampling.stop,
        )

    def take_chunks(self) -> list[Chunk]:
        """Tokens recorded since the last call, one chunk per version."""
        before, self.taken = self.taken, len(self.tokens)
        runs = spans(self.starts, len(self.tokens), self.sampling)
        cuts = [(max(before, run.start), run) for run in runs if run.stop > before]
        return [
            Chunk(tuple(self.tokens[start : run.stop]), tuple(self.logprobs[start : run.stop]), run.version, run.kv)
            for start, run in cuts
        ]


def begin(starts: list[Start], version: int, at: int, kv: int) -> None:
    """Note that the tokens from `at` on are of a version, with keys and values from `kv` on."""
    kv = -1 if kv == version else kv
    if not starts or (starts[-1].version, starts[-1].kv) != (version, kv):
        starts.append(Start(version, at, kv))


def spans(starts: Sequence[Start], num_tokens: int, sampling: Sampling) -> tuple[Span, ...]:
    """Runs of one version each. starts: ascending.

    Greedy tokens have no ratio: their recorded logprob is the policy's at temperature 1, but they were not drawn.
    Neither have those of a truncated distribution, or of one that a schema masks.
    """
    temperature, ratio = sampling.temperature, sampling.has_ratio
    stops = [start.at for start in starts[1:]] + [num_tokens]
    return tuple(
        Span(start.at, stop, start.version, temperature=temperature, ratio=ratio, kv=start.kv)
        for start, stop in zip(starts, stops, strict=True)
        if stop > start.at
    )
