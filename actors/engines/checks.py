"""Checks of a policy before an engine serves it, and of a request before it samples."""

from collections.abc import Mapping, Sequence

import numpy as np

from actors.engines.engine import ContextFull, Sampling
from infra.model.vision import Vision
from infra.policies.agreement import Agreement, agreement, disagreement, joined
from infra.policies.manifest import HashedTensors
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import Tensor, chunks
from infra.store.images import Pixels
from schemas.errors import PolicyRefused


class ProbeGate:
    """Comparison of an engine's scores with the trainer's probe (`infra.policies.agreement`). dtype: of the computation.

    It lives as long as its engine and remembers by how much the two differ where nothing is wrong.
    """

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self._floor: Agreement | None = None

    def check(self, policy: Policy, scores: Sequence[Sequence[float]]) -> float:
        """Largest difference between the engine's scores and the probe's; PolicyRefused where the engine is wrong."""
        if policy.probe is None:
            return 0.0
        try:
            found = agreement(scores, policy.probe.logprobs)
        except ValueError as error:
            raise PolicyRefused(f"policy {policy.version}: probe: {error}") from error
        if reason := disagreement(found, self._floor, self._dtype):
            raise PolicyRefused(
                f"policy {policy.version}: probe {reason}; the engine does not compute what the trainer published"
            )
        self._floor = joined(self._floor, found)
        return found.largest


def check_tensors(policy: Policy, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise PolicyRefused unless the policy has exactly the model's tensors, all finite. shapes: the model's."""
    who = f"policy {policy.version}"
    if missing := sorted(shapes.keys() - policy.tensors.keys()):
        raise PolicyRefused(f"{who}: tensor {missing[0]} is missing ({len(missing)} of {len(shapes)})")
    if unknown := sorted(policy.tensors.keys() - shapes.keys()):
        raise PolicyRefused(f"{who}: tensor {unknown[0]} is not in the model ({len(unknown)} such)")
    for name, tensor in policy.tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise PolicyRefused(f"{who}: tensor {name}: got shape {list(tensor.shape)}, expected {list(shapes[name])}")
    if not policy.finite and (wrong := HashedTensors(policy.tensors).not_finite):
        raise PolicyRefused(f"{who}: tensor {wrong} holds NaN or infinity")


def changed_names(held: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> frozenset[str]:
    """Names whose bytes differ."""
    return frozenset(name for name, tensor in wanted.items() if name not in held or not _equal(held[name], tensor))


def check_probe_sequences(probe: Probe | None, num_vocabulary: int, max_tokens: int) -> None:
    """Raise PolicyRefused for probe sequences that the engine cannot score."""
    for tokens in () if probe is None else probe.sequences:
        if not 2 <= len(tokens) <= max_tokens or min(tokens) < 0 or max(tokens) >= num_vocabulary:
            raise PolicyRefused(
                f"probe: got a sequence of {len(tokens)} tokens, expected 2 to {max_tokens} below {num_vocabulary}"
            )


def check_request(prompt: Sequence[int], sampling: Sampling, num_vocabulary: int, max_tokens: int) -> None:
    """Raise ValueError for a request no engine can serve, ContextFull where only its length is wrong.

    max_tokens: longest sequence, prompt included.
    """
    if not prompt or min(prompt) < 0 or max(prompt) >= num_vocabulary:
        raise ValueError(f"prompt: got {len(prompt)} tokens, expected at least one, each of 0 to {num_vocabulary - 1}")
    if sampling.max_tokens < 1 or len(prompt) + sampling.max_tokens > max_tokens:
        raise ContextFull(
            f"max_tokens: got {sampling.max_tokens} after a prompt of {len(prompt)}, expected 1 to "
            f"{max_tokens - len(prompt)} (the engine holds sequences of {max_tokens})"
        )
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ValueError(f"temperature: got {sampling.temperature}, expected 0 (greedy) or more")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ValueError(f"top_p: got {sampling.top_p}, expected above 0 and at most 1")
    biased = [token for token, _ in sampling.shaping.logit_bias] if sampling.shaping else []
    if biased and not 0 <= min(biased) <= max(biased) < num_vocabulary:
        raise ValueError(
            f"logit_bias: got a token of {min(biased)} to {max(biased)}, expected 0 to {num_vocabulary - 1}"
        )
    if sampling.json_schema and not sampling.stop:
        raise ValueError("stop: got no token, expected at least one, with which a JSON answer ends")


def check_images(vision: Vision | None, prompt: Sequence[int], images: Sequence[Pixels]) -> None:
    """Raise ValueError for images that the prompt has no place for, or that a model of text alone was given."""
    if vision is not None:
        vision.check(prompt, len(images))
    elif images:
        raise ValueError(f"images: got {len(images)}, expected none: the model reads text alone")


def _equal(held: Tensor, wanted: Tensor) -> bool:
    if held is wanted:
        return True
    if (held.dtype, held.shape) != (wanted.dtype, wanted.shape):
        return False
    return all(np.array_equal(old, new) for old, new in zip(chunks(held), chunks(wanted), strict=True))
