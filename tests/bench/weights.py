"""Cost of a version: CPU to publish and to fetch, size of a delta, and bytes that the engines of a host read from the store.

Weights are random, in bfloat16; each version moves 1.4 % of the values by one ulp, like a step of reinforcement learning. The
store is a folder in memory, without disk or network.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.cli.demo.char_model import build_char_model
from infra.model.model import load_model, load_tokenizer
from infra.policies.delta import decode_chain, encode_tensor
from infra.policies.fetch import PolicyFetcher
from infra.policies.manifest import HashedTensors, look_at
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import Tensor, bits, from_torch, from_torch_all, to_torch
from infra.policies.version_files import VersionFiles
from infra.roles.memory import give_back_large_blocks
from infra.store.directory import DirectoryStore
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas import PolicyEvent
from tests.bench.report import Row

WIDTH, CHANGED = 4096, 0.014
SHM = "/dev/shm"
BATCH = 64


class CountingStore(MemoryStore):
    """A store in memory that counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_bytes = 0

    def get(self, key: str) -> bytes:
        data = super().get(key)
        self.read_bytes += len(data)
        return data


def run(gb: float = 0.5, versions: int = 20, engines: int = 8, steps: int = 200) -> Iterator[Row]:
    """gb: GB of weights. versions: last version. engines: engines of a host. steps: training steps before the delta."""
    torch.set_num_threads(1)
    give_back_large_blocks()
    with tempfile.TemporaryDirectory(dir=SHM) as store, tempfile.TemporaryDirectory(dir=SHM) as files:
        yield from way_rows(DirectoryStore(Path(store)), Path(files), gb, versions)
    yield from host_rows(engines, min(gb, 0.032))
    yield from delta_rows(steps)


def way_rows(store: Store, files: Path, gb: float, versions: int) -> Iterator[Row]:
    generator = np.random.default_rng(0)
    tensors, previous = made_up(gb, generator), None
    full_gb = sum(each.num_bytes for each in tensors.values()) / 1e9
    fetcher = PolicyFetcher(store, "main", VersionFiles([files]))
    policy = None
    for version in range(versions + 1):
        parameters = {name: to_torch(each) for name, each in tensors.items()}
        begin_s = time.process_time()
        copied = HashedTensors(from_torch_all(parameters))
        assert not copied.not_finite
        event = published(store, version, copied, previous)
        publish_s = time.process_time() - begin_s
        begin_s = time.process_time()
        policy = fetcher.fetch(event)
        fetch_s = time.process_time() - begin_s
        if version in {0, 1, versions}:
            yield Row(f"publish, version {version}", publish_s / full_gb, "CPU s/GB", high=1.0 if version else None)
            yield Row(f"fetch, version {version}", fetch_s / full_gb, "CPU s/GB", high=1.5 if version else None)
        if version < versions:
            tensors, previous = moved(tensors, generator), copied
    assert policy is not None
    assert all(look_at(policy.tensors[name]).xxh3 == look_at(each).xxh3 for name, each in tensors.items())


def published(store: Store, version: int, tensors: HashedTensors, previous: HashedTensors | None) -> PolicyEvent:
    new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
    return publish(store, new, tensors, previous=previous, probe=None)


def made_up(gb: float, generator: np.random.Generator) -> dict[str, Tensor]:
    """Normal weights in bfloat16, matrices of 32 MiB and one smaller."""
    rows_left, tensors = max(1, int(gb * 1e9 / 2 / WIDTH)), dict[str, Tensor]()
    while rows_left:
        rows = min(rows_left, WIDTH)
        values = generator.standard_normal((rows, WIDTH), dtype=np.float32) * np.float32(0.02)
        patterns = (values.view(np.uint32) >> 16).astype(np.uint16)
        name = f"layers.{len(tensors)}.weight"
        tensors[name] = Tensor("BF16", (rows, WIDTH), patterns.reshape(-1).view(np.uint8).data)
        rows_left -= rows
    return tensors


def moved(tensors: Mapping[str, Tensor], generator: np.random.Generator) -> dict[str, Tensor]:
    """The next version: a share of the values one ulp up or down."""
    following = {}
    for name, tensor in tensors.items():
        patterns = bits(tensor).copy()
        at = np.cumsum(generator.geometric(CHANGED, int(1.2 * CHANGED * patterns.size) + 100)) - 1
        at = at[at < patterns.size]
        at = at[(patterns[at] & 0x7FFF) > 0]  # below zero's bits lie those of NaN
        patterns[at] += generator.choice(np.array([1, 0xFFFF], np.uint16), at.size)
        following[name] = Tensor("BF16", tensor.shape, patterns.view(np.uint8).data)
    return following


def host_rows(engines: int, gb: float) -> Iterator[Row]:
    """Bytes of a version that engines of one host read from the store."""
    store, generator = CountingStore(), np.random.default_rng(0)
    tensors = made_up(gb, generator)
    event = published(store, 0, HashedTensors(tensors), None)
    with tempfile.TemporaryDirectory(dir=SHM) as folder:
        fetchers = [PolicyFetcher(store, "main", VersionFiles([Path(folder)])) for _ in range(engines)]
        for fetcher in fetchers:
            fetcher.fetch(event)
    full = sum(each.num_bytes for each in tensors.values())
    yield Row(f"read from the store by {engines} engines of one host", store.read_bytes / full, "versions", high=1.05)


def delta_rows(steps: int) -> Iterator[Row]:
    """Steps of reinforcement in bfloat16 on the demo's model, whose Adam has settled, against all weights."""
    full = delta = 0
    for number, (old, new) in enumerate(reinforced(steps, settle := steps // 7 + 1, measured=5)):
        encoded = {name: encode_tensor(old[name], new[name]) for name in new if old[name] != new[name]}
        for name, each in encoded.items():
            assert look_at(decode_chain([(each.encoder, each.payload)], old[name])).xxh3 == look_at(new[name]).xxh3
        if number >= settle:
            full += sum(each.num_bytes for each in new.values())
            delta += sum(len(each.payload) for each in encoded.values())
    yield Row("whole version over delta", full / delta, "times", low=90.0)


def reinforced(steps: int, settle: int, measured: int) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Pairs of consecutive published weights, after the model has learned something."""
    with tempfile.TemporaryDirectory() as folder:
        build_char_model(Path(folder) / "model", 0)
        model, tokenizer = load_model(Path(folder) / "model"), load_tokenizer(Path(folder) / "model")
    generator = torch.Generator().manual_seed(0)

    def sums() -> torch.Tensor:
        pairs = torch.randint(0, 100, (BATCH, 2), generator=generator).tolist()
        return torch.tensor([tokenizer.encode(f"{a:02d}+{b:02d}={f'{a + b:03d}'[::-1]}") for a, b in pairs])

    def step(optimizer: torch.optim.Optimizer, advantage_B1: torch.Tensor | float) -> None:
        tokens_BT = sums()
        logits = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        logprob_BT = torch.log_softmax(logits, -1).gather(2, tokens_BT[:, 1:, None]).squeeze(-1)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(-(advantage_B1 * logprob_BT).mean())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    rounded: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731
        name: from_torch(value.to(torch.bfloat16)) for name, value in model.state_dict().items()
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(steps):
        step(optimizer, 1.0)
    optimizer, before = torch.optim.Adam(model.parameters(), lr=1e-6), rounded()
    for _ in range(settle + measured):
        advantages = torch.randn(BATCH, 1, generator=generator)
        step(optimizer, advantages - advantages.mean())
        yield before, (following := rounded())
        before = following
