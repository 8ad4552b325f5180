"""Sampling from models whose layers remember otherwise than by keys and values (linear attention, state spaces).

Every step reads all sequences anew. It is slow, and right for any causal model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.engines.slots import RunningBatch, RunningSequence

CACHED = frozenset(("full_attention", "sliding_attention"))  # kinds of layers whose memory is keys and values


def remembers_otherwise(model: Any) -> bool:
    """Whether some layer of a model has another memory than keys and values."""
    return not CACHED.issuperset(getattr(model.config.get_text_config(), "layer_types", None) or ())


class UncachedBatch(RunningBatch):
    """See RunningBatch. Nothing is kept from one step to the next."""

    def admit(self, rows: Sequence[RunningSequence], version: int) -> list[RunningSequence]:
        """Start sequences and sample their first token. Returns those that are finished already."""
        start = len(self.rows)
        self.rows += rows
        return self._sample(start, self._last(self.rows[start:]), version)

    def step(self, version: int) -> list[RunningSequence]:
        """One more token for every sequence. Returns those it finished."""
        return self._sample(0, self._last(self.rows), version)

    def rebuild(self, version: int) -> None:
        """Nothing is kept that could be of older weights."""

    def _last(self, rows: Sequence[RunningSequence]) -> Tensor:
        """Logits after the last token of each sequence, [B, V]."""
        sequences = [(*row.prompt, *row.trace.tokens) for row in rows]
        by_length: dict[int, list[int]] = {}
        for index, sequence in enumerate(sequences):
            by_length.setdefault(len(sequence), []).append(index)
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        for indexes in by_length.values():
            inputs = self._inputs(
                [(sequences[index], rows[index].pictures) for index in indexes],
                torch.tensor([sequences[index] for index in indexes]),
            )
            logits = self._model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1]
            for index, one in zip(indexes, logits, strict=True):
                found[index] = one
        return torch.stack(found)
