"""The packed forward: log π of every sampled token of a microbatch, under the temperature it was sampled with.

Guarantees: equal to a plain forward of each sequence up to rounding (checked once when the model is opened: a model
whose attention or head this packing would change is refused); the head runs in float32, and only where it is read.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from infra.model.model import load_model
from infra.model.vision import load_vision, model_inputs, probe_inputs
from schemas.errors import ConfigError
from trainer.batch.batch import Microbatch

MAX_LOGITS = 2**26  # 256 MiB of float32


class PackedModel:
    """A causal language model and how its sampled tokens are read. device: where it runs.

    max_logits: held at once; beyond it the head runs in pieces that are computed again in the backward.
    activation_checkpointing: so do the layers.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: str,
        device: str,
        max_logits: int = MAX_LOGITS,
        activation_checkpointing: bool = False,
    ) -> None:
        module: Any = load_model(folder, dtype=dtype)
        self.module: Any = module.to(device)
        if activation_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
            self.module.train()  # transformers recomputes in training mode only; dropout there is none to turn on
            _refuse_dropout(self.module, folder)
        self.device = torch.device(device)
        self._body = getattr(self.module, self.module.base_model_prefix)
        self._head = self.module.get_output_embeddings()
        self._head.forward = functools.partial(_float32_linear, self._head)
        self._vision = load_vision(folder)
        self._window = _sliding_window(self.module.config.get_text_config())
        self._max_logits = max_logits
        self._check(folder)

    def logprobs(self, one: Microbatch) -> torch.Tensor:
        """log π_θ of the sampled tokens, [N] float32."""
        return self._in_pieces(self._read, one, arrays=1)

    def logprobs_and_entropy(self, one: Microbatch) -> torch.Tensor:
        """log π_θ of the sampled tokens and the entropy of π_θ where each was chosen, both with gradients, [2, N] float32."""
        return self._in_pieces(self._read_both, one, arrays=3)

    @torch.no_grad()
    def hits(self, one: Microbatch) -> torch.Tensor:
        """Whether each sampled token is the most likely one, [N] bool."""
        hidden_ND, target_N = self._hidden(one), self._tensor(one.target_N)
        pieces = self._num_pieces(len(target_N))
        best = [self._head(part).argmax(-1) for part in hidden_ND.chunk(pieces)]
        return torch.cat(best) == target_N

    @torch.no_grad()
    def sequence_logprobs(self, tokens: tuple[int, ...]) -> list[float]:
        """log π at temperature 1 of every token but the first, by a plain forward; see `Vision.probe` for images."""
        ids = torch.tensor([tokens], device=self.device)
        inputs = probe_inputs(self.module, self._vision, ids[:, :-1])
        hidden_TD = self._body(**inputs, use_cache=False).last_hidden_state[0]
        logprobs: list[float] = self._read(hidden_TD, ids[0, 1:], torch.ones(1, device=self.device)).tolist()
        return logprobs

    def _hidden(self, one: Microbatch) -> torch.Tensor:
        """The last hidden state wherever a sampled token is read, [N, D]."""
        return self.states(one)[self._tensor(one.predecessor_N)]

    def states(self, one: Microbatch) -> torch.Tensor:
        """The last hidden state of every position, [B*T, D]."""
        num_T = one.tokens_BT.shape[1]
        if self._window and num_T > self._window:
            raise ValueError(f"batch: got rows of {num_T} tokens, expected at most the model's window, {self._window}")
        index_T = torch.arange(num_T, device=self.device)
        reach_BT = self._tensor(one.reach_BT)
        causal_TT = index_T[:, None] >= index_T[None, :]
        mask_BTT = causal_TT & (index_T[None, :, None] < reach_BT[:, None, :])
        inputs = model_inputs(self.module, self._tensor(one.tokens_BT), one.places_P, one.pixels_I3HW)
        hidden_BTD = self._body(
            **inputs,
            attention_mask=mask_BTT[:, None],
            position_ids=self._tensor(one.positions_BT),
            use_cache=False,
        ).last_hidden_state
        states: torch.Tensor = hidden_BTD.flatten(0, 1)
        return states

    def _in_pieces(self, read: Callable[..., torch.Tensor], one: Microbatch, *, arrays: int) -> torch.Tensor:
        """What `read` makes of all sampled tokens, [..., N]. arrays: as large as the logits, kept for its backward; no more
        are held at once than allowed.
        """
        hidden_ND = self._hidden(one)
        target_N = self._tensor(one.target_N)
        temperature_N = self._tensor(one.temperature_N)
        pieces = self._num_pieces(len(target_N) * arrays)
        if pieces == 1:
            return read(hidden_ND, target_N, temperature_N)
        parts = zip(hidden_ND.chunk(pieces), target_N.chunk(pieces), temperature_N.chunk(pieces), strict=True)
        return torch.cat([checkpoint(read, *part, use_reentrant=False) for part in parts], -1)

    def _num_pieces(self, num_tokens: int) -> int:
        num_logits = num_tokens * int(self._head.out_features)
        return max(1, -(-num_logits // self._max_logits))

    def _read(self, hidden_ND: torch.Tensor, target_N: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
        logits_NV = self._head(hidden_ND) / temperature_N[:, None]
        return torch.log_softmax(logits_NV, -1).gather(1, target_N[:, None]).squeeze(1)

    def _read_both(self, hidden_ND: torch.Tensor, target_N: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
        logprob_NV = torch.log_softmax(self._head(hidden_ND) / temperature_N[:, None], -1)
        entropy_N = -(logprob_NV.exp() * logprob_NV).sum(-1)
        return torch.stack((logprob_NV.gather(1, target_N[:, None]).squeeze(1), entropy_N))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    @torch.no_grad()
    def _check(self, folder: str) -> None:
        """Compare the packed reading of two branches of text with the model's own logits. Raises ConfigError."""
        if getattr(
            self.module.config.get_text_config(), "final_logit_softcapping", None
        ):  # random weights would not show it
            raise ConfigError(f"policy.model: {folder}: final_logit_softcapping is not supported")
        vocabulary = self._head.out_features
        branches = [[token % vocabulary for token in tail] for tail in ([5, 6, 7, 8, 9], [5, 6, 11, 12, 13])]
        one = Microbatch(
            tokens_BT=np.array([branches[0][:4] + branches[1][2:4]]),
            positions_BT=np.array([[0, 1, 2, 3, 2, 3]]),
            reach_BT=np.array([[6, 6, 4, 4, 6, 6]]),
            predecessor_N=np.array([3, 5]),
            target_N=np.array([branch[4] for branch in branches]),
            temperature_N=np.ones(2, np.float32),
            **{name: np.zeros(2, np.float32) for name in ("behaviour_N", "advantage_N", "weight_N")},
            **{name: np.zeros(2, np.float32) for name in ("teacher_N", "reward_N")},
            **{name: np.zeros(2, np.int64) for name in ("version_N", "ratio_N", "lane_N", "sequence_N")},
            **{name: np.full(2, -1) for name in ("pair_N", "bootstrap_N")},
        )
        ids = torch.tensor([branch[:4] for branch in branches], device=self.device)
        logits = self.module(input_ids=ids, use_cache=False).logits[:, -1].float()
        plain = torch.log_softmax(logits, -1).gather(1, self._tensor(one.target_N)[:, None]).squeeze(1)
        tolerance = 1e-3 if self.module.dtype == torch.float32 else 0.1
        if not bool((distance := (self.logprobs(one) - plain).abs().max()) <= tolerance):
            raise ConfigError(
                f"policy.model: {folder} ({self.module.config.model_type}) gives other logprobs when packed (off by "
                f"{distance:.3g}, expected at most {tolerance}): its attention or its head is not supported"
            )


def _float32_linear(head: Any, hidden: torch.Tensor) -> torch.Tensor:
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)


def _refuse_dropout(module: torch.nn.Module, folder: str) -> None:
    active = [name for name, one in module.named_modules() if isinstance(one, torch.nn.Dropout) and one.p > 0]
    rate = getattr(module.config, "attention_dropout", 0.0) or 0.0
    if active or rate > 0:
        raise ConfigError(
            f"trainer.activation_checkpointing: {folder} has dropout ({active[0] if active else 'attention_dropout'}), "
            "which training mode would turn on; expected a model without it"
        )


def _sliding_window(config: Any) -> int:
    """Tokens beyond which some layer would not see what the packed mask shows; 0 for no bound."""
    kinds = getattr(config, "layer_types", None) or ()
    return int(getattr(config, "sliding_window", 0) or 0) if "sliding_attention" in kinds else 0
