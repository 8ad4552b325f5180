"""The torch engine samples every family from its own distribution: windows, sinks and soft caps count as in a plain forward."""

import asyncio
from pathlib import Path

import pytest
import torch

from actors.engines.engine import Completion, Sampling
from actors.engines.torch import TorchEngine
from infra.model.model import load_model
from tests.tiny_models import WINDOW, build_tiny_model

FAMILIES = ("gemma2", "gemma3", "gpt-oss", "llama", "mistral", "phi", "qwen2.5", "qwen3-moe", "qwen3.5")


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_logprobs_of_every_family_are_those_of_a_plain_forward(tmp_path: Path, family: str) -> None:
    folder = build_tiny_model(tmp_path / family, family)
    prompts = [(1, 20, 30, *range(40, 40 + length)) for length in (0, WINDOW + 4)]

    async def sampled() -> list[Completion]:
        engine = TorchEngine(model=str(folder), seed=3)
        await engine.start()
        try:
            return await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=20)) for prompt in prompts))
        finally:
            await engine.close()

    plain = load_model(str(folder))
    for prompt, completion in zip(prompts, asyncio.run(sampled()), strict=True):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        with torch.no_grad():
            logprobs = torch.log_softmax(plain(input_ids=ids, use_cache=False).logits[0].float(), -1)
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
        assert (torch.tensor(completion.logprobs) - expected).abs().max() < 1e-4
