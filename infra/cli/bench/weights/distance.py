"""How far recorded logprobs are from an exact computation at the version of each token: the cost of keeping keys and values."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from actors.engines.engine import Completion
    from infra.policies.tensors import Tensor

MOST_COMPLETIONS = 100  # that are computed again


def distances(
    folder: Path,
    tensors: "Callable[[int], Mapping[str, Tensor]]",
    sampled: "Sequence[tuple[Sequence[int], Completion]]",
) -> dict[str, float]:
    """Of the tokens sampled after a reload that their request lived through: |Δ logprob|, and how many versions older their
    keys and values are. folder: of the model. tensors: of a version. sampled: prompts and completions.
    """
    import torch

    from infra.model.model import load_into, load_model

    model = load_model(str(folder))
    chosen = [one for one in sampled if len(one[1].spans) > 1]
    chosen = chosen[:: -(-len(chosen) // MOST_COMPLETIONS) or 1]
    wanted: dict[int, list[tuple[int, int]]] = {}
    for index, (_, completion) in enumerate(chosen):
        for number, span in enumerate(completion.spans[1:], 1):
            wanted.setdefault(span.version, []).append((index, number))
    apart: list[float] = []
    older: list[float] = []
    for version, found in sorted(wanted.items()):
        load_into(model, tensors(version))
        for index, number in found:
            prompt, completion = chosen[index]
            span = completion.spans[number]
            ids = torch.tensor([[*prompt, *completion.tokens[: span.stop]]])
            with torch.no_grad():
                logprobs = torch.log_softmax(model(input_ids=ids[:, :-1]).logits[0].float(), -1)
            exact = logprobs.gather(1, ids[0, 1:, None])[len(prompt) - 1 + span.start :, 0].numpy()
            apart += np.abs(exact - np.array(completion.logprobs[span.start : span.stop])).tolist()
            older += [float(span.version - span.kv if span.kv >= 0 else 0)] * (span.stop - span.start)
    if not apart:
        return {"tokens": 0.0}
    return {
        "tokens": float(len(apart)),
        "versions_older": float(np.mean(older)),
        "mean": float(np.mean(apart)),
        "p99": float(np.percentile(apart, 99)),
    }
