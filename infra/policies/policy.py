"""A verified policy in memory, as the weight follower hands it to an engine."""

from collections.abc import Mapping

import msgspec

from infra.policies.adapter import Adapter
from infra.policies.tensors import Tensor


class Probe(msgspec.Struct, frozen=True):
    """Token sequences with the trainer's logprobs (temperature 1, float32). sequences: of ids. logprobs: of every token
    but the first.

    Example: Probe(sequences=((1, 22, 30),), logprobs=((-0.7, -2.1),))
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A policy ready to be loaded.

    version: of the policy. tensors: all of them, by name. touched: names of those that differ from what was held. probe:
    the trainer's logprobs to compare with, None for none. adapter: what the tensors are an adapter of; None where they are
    the whole model. finite: whether all values were found finite when they were verified; an engine looks itself where not.
    """

    version: int
    tensors: Mapping[str, Tensor]
    touched: frozenset[str]
    probe: Probe | None = None
    adapter: Adapter | None = None
    finite: bool = False
