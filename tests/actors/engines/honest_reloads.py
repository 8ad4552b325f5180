"""A random model in bfloat16, read as a trainer reads it and as an engine does: how often an honest version is refused.

    python -m tests.actors.engines.honest_reloads --layers 28 --width 256 --reloads 200

Versions differ by what a learning rate of 1e-6 changes: one value in 70, by one bit. Logits have a standard deviation of 4.
"""

import argparse
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from infra.policies.agreement import Agreement, agreement, disagreement, joined

VOCABULARY = 1024
Reading = list[list[float]]


def build(layers: int, width: int, *, experts: int = 0, seed: int = 0) -> Any:
    """A model with random weights, in bfloat16; experts: of each layer, two of them used by a token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": width}
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3", vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        initializer_range=width**-0.5, tie_word_embeddings=False, **(sizes if experts else {}),
    )  # fmt: skip
    torch.set_num_threads(1)  # of two that share a core, each waits for the other
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.randint(0, VOCABULARY, (4, 32))).logits.float()
        model.lm_head.weight.mul_(4 / logits.std())
    return model


@torch.no_grad()
def learn(model: Any, share: float = 1 / 70) -> None:
    """Move a share of the values by one bit, up or down."""
    for value in model.parameters():
        chance = torch.rand(value.shape)
        value.view(torch.int16).add_((chance < share / 2).to(torch.int16) - (chance > 1 - share / 2).to(torch.int16))


@torch.no_grad()
def as_trainer(model: Any, sequences: Sequence[Sequence[int]]) -> Reading:
    """One sequence after the other, the head in float32."""
    found = []
    for tokens in sequences:
        ids = torch.tensor([list(tokens)])
        hidden_TD = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[0]
        logprobs = torch.log_softmax(hidden_TD.float() @ model.lm_head.weight.float().T, -1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


@torch.no_grad()
def as_engine(model: Any, sequences: Sequence[Sequence[int]], rng: random.Random) -> Reading:
    """All at once, padded on the right among other rows, in one piece or with keys and values kept from a first one."""
    longest = max(map(len, sequences)) + rng.randrange(8)
    rows = [
        *map(list, sequences),
        *([rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(rng.randrange(4))),
    ]
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    cut = rng.choice((0, 16, 32))
    if cut:
        first = model(input_ids=ids[:, :cut], use_cache=True)
        then = model(input_ids=ids[:, cut:], past_key_values=first.past_key_values, use_cache=True)
        logits = torch.cat((first.logits, then.logits), 1)
    else:
        logits = model(input_ids=ids, use_cache=False).logits
    logprobs = torch.log_softmax(logits.float(), -1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return [logprobs[index, : len(tokens) - 1].tolist() for index, tokens in enumerate(sequences)]


@torch.no_grad()
def sample(model: Any, count: int, length: int) -> list[list[int]]:
    """Sequences of which the second half is the model's own."""
    ids = torch.randint(0, VOCABULARY, (count, length // 2))
    ids = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=length // 2)
    return [row.tolist() for row in ids]


def probes(pool: Sequence[Sequence[int]], rng: random.Random) -> list[list[int]]:
    """Four sequences of up to 64 tokens, as a version carries them."""
    return [list(item[: rng.randint(40, 64)]) for item in rng.sample(list(pool), 4)]


@contextmanager
def planted(value: torch.Tensor, fault: torch.Tensor) -> Iterator[None]:
    """The model with other values in one place."""
    with torch.no_grad():
        before = value.clone()
        value.copy_(fault)
        try:
            yield
        finally:
            value.copy_(before)


def reload(
    model: Any, reloads: int, rng: random.Random
) -> tuple[list[Agreement], list[str], Agreement | None, list[list[int]]]:
    """Honest versions: how far the two readings were apart, why any was refused, the floor, and the pool of sequences."""
    pool, floor = sample(model, 8, 64), None
    seen: list[Agreement] = []
    refused: list[str] = []
    for _ in range(reloads):
        sequences = probes(pool, rng)
        found = agreement(as_engine(model, sequences, rng), as_trainer(model, sequences))
        seen.append(found)
        if reason := disagreement(found, floor, "bfloat16"):
            refused.append(reason)
        else:
            floor = joined(floor, found)
        learn(model)
    return seen, refused, floor, pool


def main() -> None:
    """Print how many were refused."""
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 28), ("width", 256), ("reloads", 200), ("experts", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    rng = random.Random(0)
    model = build(asked.layers, asked.width, experts=asked.experts)
    seen, refused, floor, pool = reload(model, asked.reloads, rng)
    means, shares = [item.mean for item in seen], [item.p95 for item in seen]
    print(f"{len(refused)} of {len(seen)} honest versions refused; floor {floor}")
    print(f"mean {min(means):.4f} to {max(means):.4f}, p95 {min(shares):.4f} to {max(shares):.4f}")
    print(
        f"largest difference {max(a.largest for a in seen):.3f} nats; {sum(a.largest > 0.25 for a in seen)} above 0.25"
    )
    sequences = probes(pool, rng)
    right = as_trainer(model, sequences)
    other = build(asked.layers, asked.width, experts=asked.experts, seed=1).state_dict()
    for name, value in model.named_parameters():
        if value.dim() < 2 or (".layers." in name and f".layers.{asked.layers // 2}." not in name):
            continue
        for what, fault in (("x 1.01", value * 1.01), ("stale", other[name])):
            with planted(value, fault.detach().clone()):
                found = agreement(as_engine(model, sequences, rng), right)
            verdict = "refused" if disagreement(found, floor, "bfloat16") else "accepted"
            print(f"{verdict}: {name} {what}: mean {found.mean:.4f}, p95 {found.p95:.4f}")


if __name__ == "__main__":
    main()
