"""Measures the weight delta: one reinforcement step in bfloat16 on a trained model, against the full weights.

The model is the demo's, trained here for a few seconds, its master weights in float32 and published rounded to bfloat16
as mixed-precision trainers do. Then policy-gradient steps (centred advantages) at learning rate 1e-6 with a new Adam.
Its very first steps move every value by the whole learning rate, the worst case for a delta, and are reported apart;
what counts is where its moments have settled, after `settling_steps`.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from infra.policies.delta import decode_tensor, encode_tensor
from infra.policies.manifest import hash_tensor
from infra.policies.tensors import Tensor, from_torch

LEARNING_RATE = 1e-6
WARM_UP_RATE = 1e-3
BATCH = 64


def run(
    *, training_steps: int = 200, settling_steps: int = 30, measured_steps: int = 5, seed: int = 0
) -> dict[str, float]:
    """Train, settle, then measure; the numbers are means over the measured steps.

    full_over_delta: how many times smaller. full_over_delta_worst: of the worst measured step. full_over_delta_first:
    of the first step of all. bit_exact: 1 where every decoded tensor of every step is the published one. Speeds are
    megabytes of full weights per second, on one core.
    """
    totals = dict.fromkeys(("full_bytes", "delta_bytes", "changed", "values", "encode_s", "decode_s"), 0.0)
    ratios: list[float] = []
    exact = True
    encoders: dict[str, int] = {}
    for step, (old, new) in enumerate(_published(training_steps, settling_steps + measured_steps, seed)):
        measured = _measure(old, new, encoders)
        exact &= bool(measured.pop("exact"))
        ratios.append(measured["full_bytes"] / measured["delta_bytes"])
        if step < settling_steps:
            continue
        for name, value in measured.items():
            totals[name] += value
    return {
        "full_bytes": totals["full_bytes"] / measured_steps,
        "delta_bytes": totals["delta_bytes"] / measured_steps,
        "full_over_delta": totals["full_bytes"] / totals["delta_bytes"],
        "full_over_delta_worst": min(ratios[settling_steps:]),
        "full_over_delta_first": ratios[0],
        "changed_share": totals["changed"] / totals["values"],
        "bit_exact": float(exact),
        "encode_mb_per_s": totals["full_bytes"] / totals["encode_s"] / 1e6,
        "decode_mb_per_s": totals["full_bytes"] / totals["decode_s"] / 1e6,
        **{f"tensors_{name}": float(count) for name, count in sorted(encoders.items())},
    }


def _measure(old: Mapping[str, Tensor], new: Mapping[str, Tensor], encoders: dict[str, int]) -> dict[str, float]:
    start = time.perf_counter()
    encoded = {name: encode_tensor(old[name], new[name]) for name in new if old[name] != new[name]}
    encode_s = time.perf_counter() - start
    start = time.perf_counter()
    decoded = {name: decode_tensor(one.encoder, one.payload, old[name]) for name, one in encoded.items()}
    decode_s = time.perf_counter() - start
    for one in encoded.values():
        encoders[one.encoder] = encoders.get(one.encoder, 0) + 1
    return {
        "full_bytes": float(sum(tensor.num_bytes for tensor in new.values())),
        "delta_bytes": float(sum(len(one.payload) for one in encoded.values())),
        "changed": float(sum(one.changed for one in encoded.values())),
        "values": sum(tensor.num_bytes for tensor in new.values()) / 2,
        "encode_s": encode_s,
        "decode_s": decode_s,
        "exact": float(all(hash_tensor(decoded.get(name) or old[name]) == hash_tensor(new[name]) for name in new)),
    }


def _published(
    training_steps: int, reinforcement_steps: int, seed: int
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Pairs of consecutive published weights, after the model has learned something."""
    import torch

    from infra.cli.demo.char_model import build_char_model
    from infra.model.model import load_model, load_tokenizer

    with TemporaryDirectory() as folder:
        build_char_model(Path(folder) / "model", seed)
        model = load_model(Path(folder) / "model")
        tokenizer = load_tokenizer(Path(folder) / "model")
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=WARM_UP_RATE)
    for _ in range(training_steps):
        _step(model, optimizer, _sums(tokenizer, generator), None)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    published = _rounded(model)
    for _ in range(reinforcement_steps):
        advantages = torch.randn(BATCH, 1, generator=generator)
        _step(model, optimizer, _sums(tokenizer, generator), advantages - advantages.mean())
        following = _rounded(model)
        yield published, following
        published = following


def _step(model: Any, optimizer: Any, tokens_BT: Any, advantage_B1: Any) -> None:
    """One step of −A·log π (A = 1 where there is none) over every token but the first."""
    import torch

    logits = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
    logprob_BT = torch.log_softmax(logits, -1).gather(2, tokens_BT[:, 1:, None]).squeeze(-1)
    loss = -(logprob_BT if advantage_B1 is None else advantage_B1 * logprob_BT).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _sums(tokenizer: Any, generator: Any) -> Any:
    """[BATCH, 9] token ids of `37+45=280`, the answer reversed, and such."""
    import torch

    pairs = torch.randint(0, 100, (BATCH, 2), generator=generator).tolist()
    return torch.tensor([tokenizer.encode(f"{a:02d}+{b:02d}={f'{a + b:03d}'[::-1]}") for a, b in pairs])


def _rounded(model: Any) -> dict[str, Tensor]:
    import torch

    return {name: from_torch(value.to(torch.bfloat16)) for name, value in model.state_dict().items()}
