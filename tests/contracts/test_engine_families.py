"""Model families through the whole way of a version: learner, store, engine, with logprobs that agree after every reload."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.engines.engine import Engine
from infra.policies.fetch import PolicyFetcher
from infra.policies.publish import NewVersion, publish
from infra.store.memory import MemoryStore
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.tiny_models import FAMILIES, build_tiny_model
from trainer.config import LoraConfig

SEQUENCES = ((1, *range(20, 40)), (1, *range(60, 30, -3)))


def torch_engine(folder: str) -> Engine:
    from actors.engines.torch import TorchEngine

    return TorchEngine(model=folder)


def vllm_engine(folder: str) -> Engine:
    from actors.engines.vllm.engine import VllmEngine

    return VllmEngine(model=folder, max_num_seqs=8)


@pytest.mark.full
@pytest.mark.parametrize(
    "family", sorted(FAMILIES.keys() - {"cohere", "qwen2.5-vl", "qwen3-vl"})
)  # those are refused by name
def test_three_versions_of_a_family_are_trained_published_loaded_and_proved(tmp_path: Path, family: str) -> None:
    three_versions(str(build_tiny_model(tmp_path / family, family)), torch_engine)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "llava", "qwen3.5"])
def test_three_adapters_of_a_family_are_too(tmp_path: Path, family: str) -> None:
    three_versions(str(build_tiny_model(tmp_path / family, family)), torch_engine, LoraConfig(rank=4))


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param("llama", True, marks=pytest.mark.slow),
        *(
            pytest.param(family, family != "qwen3_moe", marks=pytest.mark.full)
            for family in ("qwen3_moe", "qwen2", "gemma2", "gemma3_text", "granite")
        ),
    ],
)
def test_a_family_is_too_in_vllm_with_embeddings_tied_or_not(tmp_path: Path, family: str, tied: bool) -> None:
    three_versions(str(build_family(tmp_path / "model", family, tie_word_embeddings=tied)), vllm_engine)


def three_versions(folder: str, engine: Callable[[str], Engine], lora: LoraConfig | None = None) -> None:
    """Train, publish, fetch and load; the engine's logprobs are the learner's after each reload."""
    learner = opened("trainer.learners.torch:TorchLearner", folder, lora=lora)
    store = MemoryStore()

    async def main() -> None:
        follower, serving, previous = PolicyFetcher(store, "main"), engine(folder), None
        await serving.start()
        try:
            for version in range(3):
                learner.step(batch(version), learning_rate=1e-3, seed=version)
                tensors, probe = learner.tensors(), learner.probe(SEQUENCES)
                new = NewVersion(
                    policy="main",
                    token=0,
                    version=version,
                    parent=version - 1,
                    step=version,
                    adapter=learner.adapter,
                )
                event = publish(store, new, tensors, previous=previous, probe=probe)
                policy = await asyncio.to_thread(follower.fetch, event)
                report = await serving.load(policy)
                assert serving.version == version and report.probe_abs_max < 1e-4
                for tokens, expected in zip(SEQUENCES, probe.logprobs, strict=True):
                    assert await serving.score_tokens(tokens) == pytest.approx(expected, abs=1e-4)
                previous = tensors
        finally:
            await serving.close()

    asyncio.run(main())
