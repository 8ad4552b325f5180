"""A training step as scripts on transformers take it: every sequence a row, padded to the longest, and AdamW.

In bfloat16 the forward runs under autocast over float32 weights. Logits are computed where an answer is read, and no more.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from trainer.batch.batch import TrainItem
    from trainer.config import TrainerConfig

LOW = HIGH = 0.2  # of the clip, as GRPO's defaults


class PlainStep:
    """A model, its optimizer, and PPO's clipped surrogate as a mean over the tokens of a step (arXiv 1707.06347, eq. 7)."""

    def __init__(self, model: str, config: "TrainerConfig", *, device: str) -> None:
        import torch

        from infra.model.model import load_model

        self._config = config
        self.device = torch.device(device)
        module: Any = load_model(model)
        self.module = module.to(device)
        if config.activation_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
            self.module.train()
        self._optimizer = torch.optim.AdamW(
            self.module.parameters(), betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def logprobs(self, items: Sequence["TrainItem"]) -> list[np.ndarray]:
        """log π of each item's sampled tokens."""
        import torch

        found: list[np.ndarray] = []
        with torch.no_grad():
            for some in self._rows(items):
                logprob_BK, inputs = self._forward(some)
                found += [row[kept].cpu().numpy() for row, kept in zip(logprob_BK, inputs["kept_BK"], strict=True)]
        return found

    def step(self, items: Sequence["TrainItem"], learning_rate: float) -> float:
        """One optimizer step; its loss."""
        import torch

        num_tokens = sum(one.experience.num_sampled for one in items)
        total = 0.0
        for some in self._rows(items):
            logprob_BK, inputs = self._forward(some)
            ratio_BK = (logprob_BK - inputs["behaviour_BK"]).exp()
            advantage_BK = inputs["advantage_B"][:, None]
            surrogate_BK = torch.minimum(ratio_BK * advantage_BK, ratio_BK.clamp(1 - LOW, 1 + HIGH) * advantage_BK)
            loss = -surrogate_BK[inputs["kept_BK"]].sum() / num_tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._config.gradient_clip)
        self._optimizer.param_groups[0]["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return total

    def first_moments(self) -> Mapping[str, "torch.Tensor"]:
        """Of every weight; after one step a tenth of the gradient."""
        return {name: self._optimizer.state[value]["exp_avg"] for name, value in self.module.named_parameters()}

    def _rows(self, items: Sequence["TrainItem"]) -> list[Sequence["TrainItem"]]:
        """So many sequences at a time that padded they are as many tokens as a microbatch may have."""
        longest = max(one.experience.num_tokens for one in items)
        size = max(1, self._config.max_tokens_per_microbatch // longest)
        return [items[at : at + size] for at in range(0, len(items), size)]

    def _forward(self, items: Sequence["TrainItem"]) -> tuple["torch.Tensor", dict[str, Any]]:
        """log π of the tokens that some sequence sampled, [B, K], and what is known of these."""
        import torch

        inputs = self._padded(items)
        first = inputs["first"]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16"):
            logits_BKV = self.module(
                input_ids=inputs["ids_BT"][:, :-1],
                attention_mask=inputs["mask_BT"],
                use_cache=False,
                logits_to_keep=torch.arange(first - 1, inputs["ids_BT"].shape[1] - 1, device=self.device),
            ).logits.float()
        chosen_BK = logits_BKV.gather(2, inputs["ids_BT"][:, first:, None]).squeeze(2)
        return chosen_BK - logits_BKV.logsumexp(-1), inputs

    def _padded(self, items: Sequence["TrainItem"]) -> dict[str, Any]:
        import torch

        num_B, num_T = len(items), max(one.experience.num_tokens for one in items)
        ids_BT, length_B = np.zeros((num_B, num_T), np.int64), np.zeros(num_B, np.int64)
        behaviour_BT, sampled_BT = np.zeros((num_B, num_T), np.float32), np.zeros((num_B, num_T), bool)
        for row, one in enumerate(items):
            length_B[row] = one.experience.num_tokens
            ids_BT[row, : length_B[row]] = one.experience.tokens
            for span in one.experience.spans:
                sampled_BT[row, span.start : span.stop] = True
            behaviour_BT[row, sampled_BT[row]] = one.experience.logprobs
        first = int(sampled_BT.any(0).argmax())
        arrays = {
            "ids_BT": ids_BT,
            "behaviour_BK": behaviour_BT[:, first:],
            "kept_BK": sampled_BT[:, first:],
            "advantage_B": np.array([one.item.advantage for one in items], np.float32),
        }
        found: dict[str, Any] = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        mask_BT = torch.from_numpy(np.arange(num_T - 1) < length_B[:, None] - 1).to(self.device)
        # Without padding there is nothing to mask but the future, which SDPA does best by itself.
        return found | {"first": first, "mask_BT": None if mask_BT.all() else mask_BT}
