"""A verified policy in memory, as the weight follower hands it to an engine, and the adapter it may be.

An adapter is a LoRA (arXiv:2106.09685): W' = W + alpha / rank · B A, of which A and B alone are trained.
"""

from collections.abc import Mapping

import msgspec

from infra.policies.tensors import Tensor


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an adapter. A policy keeps them for life.

    rank: of its two matrices. alpha: its output is scaled by alpha / rank. targets: names of the adapted modules, each
    the end of one or more module names; sorted. base: hash of the folder's tensors that it is an adapter of, see
    `infra.model.adapter.base_hash`. within: name of the module that alone is adapted (the text model of one that takes
    pictures), "" for the whole.
    """

    rank: int
    alpha: int
    targets: tuple[str, ...]
    base: str
    within: str = ""

    def __str__(self) -> str:
        where = f" within {self.within}" if self.within else ""
        return (
            f"rank {self.rank}, alpha {self.alpha}, targets {', '.join(self.targets)}{where}, on base {self.base[:12]}"
        )


def described(adapter: Adapter | None) -> str:
    """In words, for messages that compare two."""
    return "full weights" if adapter is None else f"an adapter of {adapter}"


class Probe(msgspec.Struct, frozen=True):
    """Token sequences with the trainer's logprobs (temperature 1, float32). sequences: of ids. logprobs: of every token
    but the first.
    """

    sequences: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A version's weights, ready to load.

    version: policy version. tensors: all tensors by name. probe: logprobs of the trainer for a comparison, None for none.
    adapter: base model and settings of an adapter, None for a full model. finite: True if all values were found finite; if
    False, the engine checks them.
    """

    version: int
    tensors: Mapping[str, Tensor]
    probe: Probe | None = None
    adapter: Adapter | None = None
    finite: bool = False
