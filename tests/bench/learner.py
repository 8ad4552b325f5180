"""The learner's step compared with a plain step on transformers: the same model, batch, AdamW and tokens of a microbatch.

Both alternate, after a first step whose losses and gradients must agree.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infra.cli.plan.size import model_size
from infra.model.model import load_model, no_progress_bars
from infra.policies.tensors import to_torch
from schemas import BatchItem, Span, make_experience
from tests.bench.report import Row, compared
from tests.memory import peak_bytes, wait_for_card
from trainer.batch.batch import Microbatch, TrainItem, pack
from trainer.config import LaneConfig, TrainerConfig
from trainer.learners.torch import TorchLearner

RATE = 1e-6
CLIP = 0.2  # of GRPO
H100_FLOPS = 989.5e12  # a second, dense bfloat16; NVIDIA data sheet
NEAR = {"float32": (1e-5, 1e-3), "bfloat16": (1e-2, 0.2)}  # how far losses, and gradients by their norm, may be apart


class Shape(NamedTuple):
    """A batch. shared: All answer one prompt, else each its own. low: Target of the ratio."""

    name: str
    answers: int
    prompt: int
    sampled: int
    shared: bool
    low: float


SHAPES = (
    Shape("16 answers of 256 to one prompt of 512", 16, 512, 256, True, 1.3),
    Shape("8 lone answers of 256, prompts of 512", 8, 512, 256, False, 1.0),
    Shape("one row of 4,096", 1, 512, 3584, False, 1.0),
)
TINY = (Shape("4 answers to one prompt", 4, 20, 10, True, 1.0), Shape("3 lone answers", 3, 20, 10, False, 1.0))


def run(
    hidden: int = 384,
    layers: int = 7,
    repeat: int = 5,
    dtype: str = "",
    model: str = "",
    checkpointing: bool = False,
    tiny: bool = False,
) -> Iterator[Row]:
    """hidden, layers: Of a random Qwen3. model: A folder in its place. dtype: float32, on a GPU bfloat16 by default."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    config = TrainerConfig(
        lanes={"usual": LaneConfig(loss="grpo")},
        dtype=dtype,  # type: ignore[arg-type]
        max_tokens_per_microbatch=16_384,
        activation_checkpointing=checkpointing,
    )
    with tempfile.TemporaryDirectory() as folder:
        model = model or random_model(Path(folder) / "model", hidden, layers)
        yield Row("parameters", model_size(model).trained / 1e6, "M")
        for shape in TINY if tiny else SHAPES:
            yield from shape_rows(model, config, device, shape, repeat)


def shape_rows(model: str, config: TrainerConfig, device: str, shape: Shape, repeat: int) -> Iterator[Row]:
    learner, plain = TorchLearner(model, config, device=device), PlainStep(model, config, device)
    items = made_items(plain, shape)

    def ours() -> float:
        batch = pack(items, max_tokens=config.max_tokens_per_microbatch)
        return learner.step(batch, learning_rate=RATE, seed=0).loss

    def peer() -> float:
        return plain.step(items)

    apart = abs(ours() - peer()), gradients_apart(learner, plain)
    if not all(distance <= near for distance, near in zip(apart, NEAR[config.dtype], strict=True)):
        raise RuntimeError(f"learner: the steps differ by {apart} in loss and gradient; {NEAR[config.dtype]}")
    taken = [(seconds(ours, device), seconds(peer, device)) for _ in range(repeat)]
    clock = 0 if device == "cpu" else 1  # of the CPU, of the wall
    ours_s, peer_s = (statistics.median(turn[side][clock] for turn in taken) for side in (0, 1))
    yield compared(shape.name, "s", ours_s, peer_s, shape.low)
    (whole,) = pack(items, max_tokens=10**9).microbatches
    wall_s = statistics.median(turn[0][1] for turn in taken)
    tokens = len(whole.target_N) / wall_s
    cost = "learner_tokens" if shape == SHAPES[0] else ""
    yield Row(f"{shape.name}, sampled tokens", tokens, "/s", cost=cost)
    yield Row(f"{shape.name}, memory at the peak", peak_bytes(ours, device) / 2**20, "MiB")
    if device == "cuda" and "H100" in torch.cuda.get_device_name():
        yield Row(f"{shape.name}, MFU", 100 * step_flops(learner.model.module, whole) / wall_s / H100_FLOPS, "%")


def step_flops(module: Any, rows: Microbatch) -> float:
    """Operations of a forward and a backward of a dense model."""
    config, pairs = module.config, int((rows.positions_BT + 1).sum())
    weights = sum(value.numel() for name, value in module.named_parameters() if ".layers." in name and value.dim() > 1)
    attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    head = 2.0 * config.vocab_size * config.hidden_size * len(rows.target_N)
    return 3 * (2.0 * weights * rows.tokens_BT.size + attention + head)


def random_model(folder: Path, hidden: int, layers: int) -> str:
    """A Qwen3, of 26 million parameters by default."""
    config = Qwen3Config(
        vocab_size=16_384, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 128), num_key_value_heads=4, head_dim=min(128, hidden // 4),
        max_position_embeddings=32_768, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng(), no_progress_bars():
        torch.manual_seed(7)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def seconds(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds of the CPU and of the wall."""
    wait_for_card(device)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    step()
    wait_for_card(device)
    return time.process_time() - cpu_s, time.perf_counter() - wall_s


def gradients_apart(learner: TorchLearner, plain: "PlainStep") -> float:
    """‖ours - plain‖ / ‖plain‖ of Adam's first moments, after one step a tenth of the gradients."""
    state, square, apart = learner.save(), 0.0, 0.0
    for name, value in plain.module.named_parameters():
        expected = plain.optimizer.state[value]["exp_avg"].float().cpu()
        square += float(expected.square().sum())
        apart += float((to_torch(state[f"adam/exp_avg/{name}"]) - expected).square().sum())
    return float((apart / square) ** 0.5)


def made_items(plain: "PlainStep", shape: Shape) -> list[TrainItem]:
    """Random answers, as if sampled by a policy near this one."""
    random, size = np.random.default_rng(shape.answers), plain.module.config.get_text_config().vocab_size
    prompts = [random.integers(3, size, shape.prompt).tolist() for _ in range(1 if shape.shared else shape.answers)]
    answers = [random.integers(3, size, shape.sampled).tolist() for _ in range(shape.answers)]
    advantages = random.normal(size=shape.answers)

    def items(logprobs: Sequence[Any]) -> list[TrainItem]:
        found = []
        for at, answer in enumerate(answers):
            group = f"bench-{0 if shape.shared else at}.0"
            experience = make_experience(
                id=f"{group}.0-{at}-0", group=group, episode=at, group_size=shape.answers,
                tokens=[*prompts[at % len(prompts)], *answer], logprobs=np.minimum(logprobs[at], 0.0), messages=(),
                spans=(Span(shape.prompt, shape.prompt + shape.sampled, 0),),
            )  # fmt: skip
            item = BatchItem(
                id=experience.id, partition=0, offset=0, index=at, lane="usual", advantage=float(advantages[at])
            )
            found.append(TrainItem(experience, item))
        return found

    exact = plain.logprobs(items(np.zeros((shape.answers, shape.sampled))))
    return items([each + random.normal(0, 0.05, shape.sampled) for each in exact])


class PlainStep:
    """A model and AdamW; PPO's clipped surrogate as a mean over the tokens of a step (arXiv 1707.06347, eq. 7).

    Every sequence is a row. In bfloat16 the forward runs under autocast over float32 weights.
    """

    def __init__(self, model: str, config: TrainerConfig, device: str) -> None:
        self._config, self._device = config, torch.device(device)
        module: Any = load_model(model)
        self.module = module.to(device)
        if config.activation_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
            self.module.train()
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=RATE, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def logprobs(self, items: Sequence[TrainItem]) -> list[Any]:
        """log π of each item's sampled tokens."""
        with torch.no_grad():
            return [row.cpu().numpy() for rows in self._rows(items) for row in self._forward(rows)]

    def step(self, items: Sequence[TrainItem]) -> float:
        """One optimizer step; its loss."""
        total, num_tokens = 0.0, sum(each.experience.num_sampled for each in items)
        for rows in self._rows(items):
            ratio_BK = (self._forward(rows) - self._stacked(each.experience.logprobs for each in rows)).exp()
            advantage_B1 = self._stacked(np.float32([each.item.advantage]) for each in rows)
            surrogate_BK = torch.minimum(ratio_BK * advantage_B1, ratio_BK.clamp(1 - CLIP, 1 + CLIP) * advantage_B1)
            loss = -surrogate_BK.sum() / num_tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._config.gradient_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _rows(self, items: Sequence[TrainItem]) -> list[Sequence[TrainItem]]:
        size = max(1, self._config.max_tokens_per_microbatch // items[0].experience.num_tokens)
        return [items[at : at + size] for at in range(0, len(items), size)]

    def _forward(self, items: Sequence[TrainItem]) -> torch.Tensor:
        """log π of the sampled tokens, [B, K]. All rows are of one length, so that nothing is masked but the future."""
        ids_BT = self._stacked(each.experience.tokens.astype(np.int64) for each in items)
        first, num_T = items[0].experience.num_prompt, ids_BT.shape[1]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._config.dtype == "bfloat16"):
            logits_BKV = self.module(
                input_ids=ids_BT[:, :-1],
                use_cache=False,
                logits_to_keep=torch.arange(first - 1, num_T - 1, device=self._device),
            ).logits.float()
        return logits_BKV.gather(2, ids_BT[:, first:, None]).squeeze(2) - logits_BKV.logsumexp(-1)

    def _stacked(self, rows: Iterable[Any]) -> torch.Tensor:
        return torch.from_numpy(np.stack(list(rows))).to(self._device)
