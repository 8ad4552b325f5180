"""The experts an engine records are those that its tokens went to when they were sampled; through reloads too."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.engines.engine import Completion, Sampling
from actors.engines.torch import TorchEngine
from infra.model.model import load_into, load_model, model_tensors
from infra.model.routers import Routers
from schemas.errors import ConfigError
from tests.contracts.engine_case import Case, Tensors
from tests.infra.tiny_families import build_family


class RoutedCase(Case):
    """An engine that records, and what a plain forward of each version chooses."""

    def __init__(self, folder: Path) -> None:
        self.plain = load_model(str(folder))
        self.routers = Routers(self.plain)
        tensors = model_tensors(self.plain)
        super().__init__(
            TorchEngine(model=str(folder), seed=3, routing=True), tensors, self._logprobs, lambda tokens: ""
        )

    def _forward(self, tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
        load_into(self.plain, tensors)
        with torch.no_grad(), self.routers.recorded() as taken:
            logits = self.plain(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits, torch.stack(taken, 1).numpy()

    def _logprobs(self, tensors: Tensors, tokens: Sequence[int], temperature: float) -> list[float]:
        logprobs = torch.log_softmax(self._forward(tensors, tokens)[0] / temperature, -1)
        return logprobs[:-1].gather(1, torch.tensor(list(tokens))[1:, None])[:, 0].tolist()

    def assert_routed(self, prompt: Sequence[int], completion: Completion) -> None:
        """The last prompt token and the answer's but the last: each as the version that sampled its successor routes it."""
        tokens = [*prompt, *completion.tokens]
        found = completion.routing
        assert found.dtype == np.uint8 and found.shape == (len(tokens) - 1, self.routers.num_layers, self.routers.k)
        for span in completion.spans:
            expected = self._forward(self.by_version[span.version], tokens)[1]
            start = len(prompt) + span.start - 1 if span.start else 0
            at = slice(start, len(prompt) + span.stop - 1)
            assert (found[at] == expected[at]).all()


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoutedCase]:
    folder = tmp_path_factory.mktemp("engine") / request.param
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} if request.param == "gpt_oss" else {}
    with RoutedCase(build_family(folder, request.param, max_position_embeddings=512, **rope)) as made:
        yield made


def test_every_token_but_the_last_has_the_experts_it_went_to(case: RoutedCase) -> None:
    async def check(case: RoutedCase) -> None:
        prompts = [(1, *range(20, 20 + length)) for length in (1, 2, 2, 7)] * 2
        requests = [
            case.engine.generate(prompt, Sampling(max_tokens=4 + at % 3 * 5)) for at, prompt in enumerate(prompts)
        ]
        for prompt, completion in zip(prompts, await asyncio.gather(*requests), strict=True):
            case.assert_routed(prompt, completion)
            case.assert_reproduced(prompt, completion, 1.0)

    case.run(check)


def test_a_reload_in_the_middle_changes_nothing_that_is_recorded(case: RoutedCase) -> None:
    async def check(case: RoutedCase) -> None:
        prompts = [(1, 20, 30), (1, 21, 30)]
        sampling = Sampling(max_tokens=150)
        running = [asyncio.create_task(case.engine.generate(prompt, sampling)) for prompt in prompts]
        await case.engine.generate((1, 44), Sampling(max_tokens=4))
        for scale in (1.3, 0.7):
            await case.load(case.next_policy(scale=scale, only="layers"))
            await case.engine.generate((1, 44), Sampling(max_tokens=4))
        completions = await asyncio.gather(*running)
        assert min(len(completion.spans) for completion in completions) > 1
        for prompt, completion in zip(prompts, completions, strict=True):
            case.assert_routed(prompt, completion)

    case.run(check)


def test_nothing_is_recorded_unless_it_is_asked_for_and_a_model_that_cannot_say_is_refused(tmp_path: Path) -> None:
    async def unasked() -> Completion:
        engine = TorchEngine(model=str(build_family(tmp_path / "moe", "qwen3_moe")))
        await engine.start()
        try:
            return await engine.generate((1, 20), Sampling(max_tokens=2))
        finally:
            await engine.close()

    assert asyncio.run(unasked()).routing is None
    dense = TorchEngine(model=str(build_family(tmp_path / "dense", "qwen3")), routing=True)
    with pytest.raises(ConfigError, match=r"engine\.options\.routing: .*\(qwen3\) has no routers"):
        asyncio.run(dense.start())
