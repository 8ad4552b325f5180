"""The forward: log π of every sampled token of a microbatch, under the temperature it was sampled with.

Guarantees: equal to a plain forward of each sequence up to rounding (checked once when the model is opened, see
`trainer.learners.opening`); the head's sums are float32, and only where it is read; memory is linear in the length of a row.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from infra.model.adapter import REFERENCE, adapter_parameters, computing_with, find_adapter, put_adapter
from infra.model.model import load_model
from infra.model.vision import load_vision, model_inputs, probe_inputs, probe_picture
from infra.policies.policy import Adapter
from schemas.errors import ConfigError
from schemas.fields import Lane
from trainer.batch.batch import Microbatch
from trainer.batch.split import Paths, unpacked
from trainer.batch.tree import no_pixels
from trainer.config import TrainerConfig
from trainer.learners.attention import Abilities, Path, RowTrees, chain, dense_mask, reading_path, row_path
from trainer.learners.head import Head
from trainer.learners.opening import find_abilities, reading_words
from trainer.losses.loss import Objective

MAX_LOGITS = 2**26  # 256 MiB of float32
Reader = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # of hidden states, targets and temperatures


class PackedModel:
    """A causal language model and how its sampled tokens are read. device: where it runs.

    max_logits: held at once; beyond it the head runs in pieces that are computed again in the backward.
    activation_checkpointing: so do the layers. module: the folder's model; it is read only after `find_reading`. looks_always:
    the vision tower computes for rows without a picture too, and its gradients are 0 there: for ranks that reduce gradients
    as they come, gather shards as they are used, and would keep the gradient of an earlier step.
    """

    def __init__(
        self,
        folder: str,
        *,
        dtype: str,
        device: str,
        max_logits: int = MAX_LOGITS,
        activation_checkpointing: bool = False,
        module: Any = None,
        looks_always: bool = False,
    ) -> None:
        self.module: Any = module
        if module is None:
            self.module = load_model(folder, dtype=dtype).to(device)
        if activation_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
            self.module.train()  # transformers recomputes in training mode only; the model has no dropout to turn on
            _refuse_dropout(self.module, folder)
        self.device = torch.device(device)
        self._body = getattr(self.module, self.module.base_model_prefix)
        cap = getattr(self.module.config.get_text_config(), "final_logit_softcapping", None)
        self._head = Head(self.module.get_output_embeddings(), softcap=float(cap or 0), max_logits=max_logits)
        self._vision = load_vision(folder)
        self._unshown = no_pixels()
        if looks_always and self._vision is not None:
            self._unshown = self._vision.prepare(probe_picture(0))[None]
        # Masks that are not SDPA's are only known for the tree's attention: then a plain sequence is a tree too.
        self._own_masks = self.module.config._attn_implementation == "sdpa"
        self._folder = folder
        self._family = Abilities(dense=False, tree=False)
        self.adapter: Adapter | None = None
        if module is None:
            self.find_reading()

    def find_reading(self) -> None:
        """Find the paths that read the model's rows, see `trainer.learners.opening`. Raises ConfigError."""
        self._family = find_abilities(self.module, self._folder, self._head.num_tokens, self._logprobs_by)

    def adapt(self, adapter: Adapter | None, *, with_reference: bool = False) -> None:
        """Train an adapter in place of the model's own weights; None changes nothing. See `infra.model.adapter.put_adapter`."""
        if adapter is not None:
            put_adapter(self.module, adapter, with_reference=with_reference)
            self.adapter = adapter

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that the optimizer moves, by the model's own names, or the adapter's by published ones."""
        return dict(self.module.named_parameters()) if self.adapter is None else adapter_parameters(self.module)

    def sum_gradient(self, value: torch.nn.Parameter, total: Callable[[], torch.Tensor]) -> None:
        """Sum a parameter's gradients in float32. total: the sum, asked for in a backward.

        The head adds to the sum itself, and on a CPU an embedding hands over the rows of its tokens alone: a gradient as
        large as the vocabulary takes new memory at every microbatch.
        """
        embedding = self.module.get_input_embeddings()
        if value is embedding.weight and isinstance(embedding, torch.nn.Embedding):
            embedding.sparse = self.device.type == "cpu"
        if value is self.module.get_output_embeddings().weight:
            self._head.total = total
        value.register_post_accumulate_grad_hook(functools.partial(_add_gradient, total))  # type: ignore[no-untyped-call]

    @property
    def reading(self) -> str:
        """The path of rows, in words: bits depend on it."""
        return reading_words(self.device.type, self._family)

    def logprobs(self, rows: Microbatch) -> torch.Tensor:
        """log π_θ of the sampled tokens, [N] float32."""
        return self._read(self._head.logprobs, rows)

    def logprobs_and_entropy(self, rows: Microbatch) -> torch.Tensor:
        """log π_θ of the sampled tokens and the entropy of π_θ where each was chosen, both with gradients, [2, N] float32."""
        return self._read(self._head.logprobs_and_entropy, rows)

    @torch.no_grad()
    def hits(self, rows: Microbatch) -> torch.Tensor:
        """True where the sampled token is the most likely one, [N] bool."""
        return self._read(lambda hidden, target, _: (self._head.most_likely(hidden) == target).float(), rows).bool()

    @torch.no_grad()
    def sequence_logprobs(self, tokens: tuple[int, ...]) -> list[float]:
        """log π at temperature 1 of every token but the first, by a plain forward; see `Vision.probe` for images."""
        ids = torch.tensor([tokens], device=self.device)
        inputs = dict(probe_inputs(self.module, self._vision, ids[:, :-1]))
        if self._family.tree and not self._own_masks:
            inputs |= chain(ids[:, :-1], reading_path(self.device.type, len(tokens), self._family)).inputs()
        hidden_TD = self._body(**inputs, use_cache=False).last_hidden_state[0]
        logprobs: list[float] = self._head.logprobs(hidden_TD, ids[0, 1:], torch.ones(1, device=self.device)).tolist()
        return logprobs

    def states(self, rows: Microbatch) -> torch.Tensor:
        """The last hidden state of every position, [B*T, D]; the state of a position that nothing reads may be anything."""
        path = reading_path(self.device.type, rows.tokens_BT.shape[1], self._family)
        return self._states(rows, row_path(rows.reach_BT, path, self._family))

    def _read(self, read: Reader, rows: Microbatch) -> torch.Tensor:
        state_PD, at_N = self.states(rows), self._tensor(rows.predecessor_N)
        return read(state_PD[at_N], *self._targets(rows))

    def _targets(self, rows: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tensor(rows.target_N), self._tensor(rows.temperature_N)

    def _logprobs_by(self, rows: Microbatch, path: Path | None) -> torch.Tensor:
        return self._head.logprobs(self._states(rows, path)[self._tensor(rows.predecessor_N)], *self._targets(rows))

    def _states(self, rows: Microbatch, path: Path | None) -> torch.Tensor:
        """`states` by one path; None: as if each row were one text."""
        if path == "unpacked":
            return self._unpacked_states(rows)
        inputs = self._inputs(rows.tokens_BT, rows)
        reach_BT, position_BT = self._tensor(rows.reach_BT), self._tensor(rows.positions_BT)
        if path == "dense":
            inputs |= {"attention_mask": dense_mask(reach_BT), "position_ids": position_BT}
        elif path is not None:
            inputs |= RowTrees(reach_BT, position_BT, path).inputs()
        return self._hidden(inputs)

    def _hidden(self, inputs: dict[str, Any]) -> torch.Tensor:
        states: torch.Tensor = self._body(**inputs, use_cache=False).last_hidden_state
        return states.flatten(0, 1)

    def _unpacked_states(self, rows: Microbatch) -> torch.Tensor:
        """The states of each sequence for itself; some of them at a time, and computed again in the backward."""
        groups = unpacked(rows)
        where = np.zeros(rows.tokens_BT.size, np.int64)
        states, num = [], 0
        for group in groups:
            again = torch.is_grad_enabled() and len(groups) > 1
            read = functools.partial(self._side_by_side, group)
            states.append(checkpoint(read, use_reentrant=False) if again else read())
            where[group.node_P] = num + np.arange(len(group.node_P))
            num += len(group.node_P)
        return torch.cat(states)[self._tensor(where)]

    def _side_by_side(self, group: Paths) -> torch.Tensor:
        """The states of a group's tokens, [P, D]: no sequence attends to its neighbours, nor to the padding after it."""
        return self._hidden(self._inputs(group.tokens_GL, group))[self._tensor(group.cell_P)]

    def _inputs(self, tokens_BT: np.ndarray, shown: Microbatch | Paths) -> dict[str, Any]:
        pixels = shown.pixels_I3HW if len(shown.pixels_I3HW) else self._unshown
        return dict(model_inputs(self.module, self._tensor(tokens_BT), shown.places_P, pixels))

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def _add_gradient(total: Callable[[], torch.Tensor], value: torch.nn.Parameter) -> None:
    if value.grad is not None and value.grad.is_sparse:
        total().index_add_(0, value.grad._indices()[0], value.grad._values().float())
    elif value.grad is not None:
        total().add_(value.grad)
    value.grad = None


def policy_settings(config: TrainerConfig) -> dict[str, Any]:
    return {"dtype": config.dtype, "activation_checkpointing": config.activation_checkpointing}


def _refuse_dropout(module: torch.nn.Module, folder: str) -> None:
    active = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Dropout) and layer.p > 0]
    rate = getattr(module.config, "attention_dropout", 0.0) or 0.0
    if active or rate > 0:
        raise ConfigError(
            f"trainer.activation_checkpointing: {folder} has dropout ({active[0] if active else 'attention_dropout'}), "
            "which training mode would turn on; expected a model without it"
        )


Run = Callable[[str, Any], Any]


def open_adapter(config: TrainerConfig, model: str) -> Adapter | None:
    """The adapter that is trained in place of the model's weights, None for all of them. Raises ConfigError."""
    lora = config.lora
    return None if lora is None else find_adapter(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def compared(objectives: Mapping[Lane, Objective]) -> bool:
    """True if some lane compares the policy with a reference."""
    return any(objective.reference for objective in objectives.values())


class ReferenceAdapter:
    """The reference of a policy that is an adapter: the same base, under an adapter that is not trained.

    It takes no second model. Where no warm-up came before training, its B is zero and it is the base itself.
    """

    def __init__(self, policy: PackedModel) -> None:
        self._policy = policy
        self.trained = adapter_parameters(policy.module, REFERENCE)

    def logprobs(self, rows: Microbatch) -> torch.Tensor:
        """log π_ref of the sampled tokens, [N] float32; without gradients alone."""
        found: torch.Tensor = self.through(lambda what, of: getattr(self._policy, what)(of))("logprobs", rows)
        return found

    def through(self, run: Run) -> Run:
        """`run` on the reference. run: name of a method of PackedModel, and a microbatch; where ranks compute together, the
        engine of all of them.
        """

        def compare(what: str, argument: Any) -> Any:
            with computing_with(self._policy.module, REFERENCE):
                return run(what, argument)

        return compare


def open_reference(policy: PackedModel, again: Callable[[], PackedModel]) -> PackedModel | ReferenceAdapter:
    """The reference: a second adapter of the policy's, or without one a second model. again: opens that."""
    return again() if policy.adapter is None else ReferenceAdapter(policy)
