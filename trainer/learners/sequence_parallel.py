"""Rows that one GPU cannot hold, over several: Ulysses (arXiv 2309.14509), with DeepSpeed's all-to-all.

    through the layers  each of the N ranks of a group holds 1/N of every row's tokens, a stretch of them in their order
    inside attention    it holds all tokens for 1/N of the heads: our own attention reads whole trees
    at the head         it reads the sampled tokens whose states it holds, and sends the others their logprobs

Guarantees: logprobs and gradients are those of one rank up to rounding; a model that this does not hold for is refused by
name before its weights are loaded, or, where only its numbers tell, when it is opened. Rows are padded to a multiple of N.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as distributed

from infra.model.model import meta_model
from infra.model.vision import takes_pictures
from schemas.errors import ConfigError
from trainer.batch.batch import Microbatch
from trainer.batch.split import widened
from trainer.learners.attention import DENSE_TOKENS, Abilities, Path, RowTrees, reading_path
from trainer.learners.forward import PackedModel, Reader
from trainer.learners.opening import mixes_neighbours, require_same, takes_tree

WHERE = "trainer.learner.options.sequence_parallel"
MOVING_ROPE = ("dynamic", "longrope")  # their angles depend on the longest position that a forward sees


class SequenceGroup(msgspec.Struct, frozen=True):
    """The ranks that compute the same rows together.

    size: N ranks. place: this rank's among them, whose stretch of tokens and whose heads it has. groups: how many there are.
    process_group: torch's; None where every rank is one of its own.
    """

    size: int = 1
    place: int = 0
    groups: int = 1
    process_group: Any = None

    @property
    def counts(self) -> bool:
        """True if this rank's results count in sums over ranks: all ranks of a group have the same."""
        return not self.place


def open_group(size: int, timeout_s: float) -> SequenceGroup:
    """This rank's group of `size` consecutive ranks. Collective. Raises ConfigError."""
    world, rank = distributed.get_world_size(), distributed.get_rank()
    require_ranks(size, world)
    if size == 1:
        return SequenceGroup(groups=world)
    every = [
        distributed.new_group(list(range(first, first + size)), timeout=timedelta(seconds=timeout_s))
        for first in range(0, world, size)
    ]
    return SequenceGroup(size, rank % size, world // size, every[rank // size])


def require_ranks(size: int, world: int) -> None:
    """Raise ConfigError where `world` ranks make no groups of `size`."""
    if size < 1 or world % size:
        raise ConfigError(f"{WHERE}: got {size} with {world} rank(s), expected a number that divides them")


def open_packed(folder: str, group: SequenceGroup, **settings: Any) -> PackedModel:
    """The model of a folder, whose rows the ranks of a group share. settings: of `PackedModel`. Raises ConfigError."""
    if group.size == 1:
        return PackedModel(folder, **settings)
    require_divisible(folder, group.size)
    return SplitModel(folder, group, **settings)


def require_divisible(folder: str, size: int) -> None:
    """Raise ConfigError, from config.json alone, for a model whose rows cannot be split over `size` ranks."""
    if takes_pictures(folder):
        raise ConfigError(
            f"{WHERE}: got {size} with {folder}, which takes pictures, expected 1: rows of text alone are split"
        )
    module: Any = meta_model(folder)
    config = module.config.get_text_config()
    ropes = [kind for kind in MOVING_ROPE if f"'rope_type': '{kind}'" in str(getattr(config, "rope_parameters", None))]
    why = mixes_neighbours(module, config)
    why = why or (f"its positions ({ropes[0]}) depend on the longest row" if ropes else "")
    if why or not takes_tree(module):
        why = why or "its attention takes no trees"
        raise ConfigError(f"{WHERE}: got {size} with {folder} ({config.model_type}), expected 1: {why}")
    heads = int(config.num_attention_heads)
    of_keys = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % size or (of_keys % size and size % of_keys):
        raise ConfigError(
            f"{WHERE}: got {size} with {heads} heads and {of_keys} of keys in {folder}, expected a number that divides the "
            "heads, and divides those of keys or is a multiple of them"
        )


class Part(NamedTuple):
    """A rank's part of a microbatch: P of the T tokens of each row, R of the N sampled ones.

    tokens_BP, positions_BP: its stretch of every row. read_R: which sampled tokens it reads. at_R: where it reads them,
    indexes into B*P. experts_BPLk: see `Microbatch`.
    """

    tokens_BP: np.ndarray
    positions_BP: np.ndarray
    read_R: np.ndarray
    at_R: np.ndarray
    experts_BPLk: np.ndarray


def rank_part(rows: Microbatch, size: int, place: int) -> Part:
    """The part of one of `size` ranks. The rows are of a multiple of `size` tokens."""
    num_T = rows.tokens_BT.shape[1]
    num_P = num_T // size
    mine = slice(place * num_P, (place + 1) * num_P)
    row_N, index_N = np.divmod(rows.predecessor_N, num_T)
    read_R = np.flatnonzero(index_N // num_P == place)
    at_R = row_N[read_R] * num_P + index_N[read_R] - mine.start
    return Part(rows.tokens_BT[:, mine], rows.positions_BT[:, mine], read_R, at_R, rows.experts_BTLk[:, mine])


class SplitModel(PackedModel):
    """A model of which each rank of a group computes its part of every row. What is asked of it is collective in the group,
    but for `sequence_logprobs`, for which each rank reads a sequence whole, without gradients.
    """

    def __init__(self, folder: str, group: SequenceGroup, **settings: Any) -> None:
        self._group = group
        self._across = Ulysses(group)
        super().__init__(folder, **settings)

    def find_reading(self) -> None:
        """As `PackedModel`, and check that parts of rows are read as rows are. Raises ConfigError."""
        super().find_reading()
        found = f"{WHERE}: got {self._group.size} with {self._folder}, expected 1"
        if not self._family.tree:
            raise ConfigError(f"{found}: its rows are read sequence by sequence")
        problem = f"{found}: parts of a row have other logprobs than the row"
        logprobs = self._logprobs_by
        require_same(self.module, problem, self._head.num_tokens, logprobs, path=self._path, other=self.logprobs)

    @property
    def _path(self) -> Path:
        """Never a dense mask: layers under one would see their own stretch alone."""
        return reading_path(self.device.type, DENSE_TOKENS + 1, Abilities(dense=False, tree=True))

    @property
    def reading(self) -> str:
        """The path of rows, in words: bits depend on it."""
        return f"{self._path} split over {self._group.size} ranks"

    def _read(self, read: Reader, rows: Microbatch) -> torch.Tensor:
        size = self._group.size
        rows = widened(rows, -(-rows.tokens_BT.shape[1] // size) * size)
        part = rank_part(rows, size, self._group.place)
        reach_BT, position_BT = self._tensor(rows.reach_BT), self._tensor(rows.positions_BT)
        inputs = RowTrees(reach_BT, position_BT, self._path, across=self._across).inputs()
        inputs |= {"input_ids": self._tensor(part.tokens_BP), "position_ids": self._tensor(part.positions_BP)}
        given = self._given(part.experts_BPLk)
        state_PD = self._routed(inputs, given)
        read_R = self._tensor(part.read_R)
        target_N, temperature_N = self._targets(rows)
        found = read(state_PD[self._tensor(part.at_R)], target_N[read_R], temperature_N[read_R])
        differs_R = None if given is None else given.shares()[self._tensor(part.at_R)]
        self._rerouted_N = None if differs_R is None else self._gathered(differs_R, read_R, len(target_N))
        return self._gathered(found, read_R, len(target_N))

    def _gathered(self, found: torch.Tensor, read_R: torch.Tensor, num_N: int) -> torch.Tensor:
        every: torch.Tensor = Gathered.apply(found, read_R, num_N, self._group.process_group)  # type: ignore[no-untyped-call]
        return every


class Ulysses:
    """Attention across a group: from a stretch of tokens with all heads to all tokens with 1/N of the heads, and
    back. Key heads fewer than N are repeated, so that each rank has the one that its queries use.
    """

    def __init__(self, group: SequenceGroup) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        self._group = group
        self._exchange: Any = DistributedAttention(_attended, group.process_group, scatter_idx=2, gather_idx=1)

    def __call__(
        self, attend: Callable[..., torch.Tensor], parts: tuple[torch.Tensor, ...], sinks_H: torch.Tensor | None
    ) -> torch.Tensor:
        """parts: query, key and value, [B, heads, P, D] each. attend: of those of a few heads and of these heads' sinks, as
        `tree_attention` computes it. Gives [B, P, H, D].
        """
        query, key, value = (tensor.transpose(1, 2) for tensor in parts)
        if more := self._group.size // key.shape[2]:
            key, value = (tensor.repeat_interleave(more, 2) if more > 1 else tensor for tensor in (key, value))
        sinks = None if sinks_H is None else sinks_H.chunk(self._group.size)[self._group.place]
        found: torch.Tensor = self._exchange(query, key, value, 0, None, attend, sinks)
        return found


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Callable[..., torch.Tensor],
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    return attend(*(tensor.transpose(1, 2) for tensor in (query, key, value)), sinks)


class Gathered(torch.autograd.Function):
    """An all-gather of what each rank of a group read, [..., R], to [..., N]. All of them make the same loss of it, so each
    has the gradient of what it read already: nothing is exchanged on the way back.
    """

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, read_R: torch.Tensor, num_N: int, process_group: Any) -> torch.Tensor:
        """read_R: which of the N a rank read; each is read by one."""
        ctx.save_for_backward(read_R)
        every = found.new_zeros((*found.shape[:-1], num_N))
        every[..., read_R] = found
        distributed.all_reduce(every, group=process_group)
        return every

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradient of what this rank read."""
        (read_R,) = ctx.saved_tensors
        return gradients[0][..., read_R], None, None, None
