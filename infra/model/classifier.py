"""Sequence classifiers from a folder, as reward models are."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra.model.model import not_loadable, own_kernels

if TYPE_CHECKING:
    import torch


class Classifier:
    """A sequence classifier on the CPU."""

    def __init__(self, module: "torch.nn.Module") -> None:
        self.module = module

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """One number per class for one sequence."""
        import torch

        with torch.inference_mode():
            logits = self.module(input_ids=torch.tensor([list(tokens)])).logits[0]
        return [float(value) for value in logits]


def build_classifier(folder: str | Path) -> Classifier:
    """The sequence classifier that a folder's config.json describes, with weights yet to be loaded. Raises ConfigError."""
    from transformers import AutoModelForSequenceClassification

    try:
        model = AutoModelForSequenceClassification.from_config(own_kernels(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise not_loadable("classifier", folder, "config.json of a sequence classifier", error) from error
    return Classifier(model.float().eval())
