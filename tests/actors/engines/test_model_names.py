"""Engines whose model is named as in the local Hugging Face cache."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from actors.engines.engine import Engine, Sampling
from actors.engines.reload import HasFolder
from infra.policies.tensors import to_numpy
from tests.contracts.engine_case import Case, char_model
from tests.variables import variables

NAME, COMMIT = "org/tiny-model", "a" * 40


def torch_engine() -> Engine:
    from actors.engines.torch import TorchEngine

    return TorchEngine(model=NAME, seed=3)


def vllm_engine() -> Engine:
    from actors.engines.vllm.engine import VllmEngine

    return VllmEngine(model=NAME, seed=3, max_num_seqs=16)


def answers_and_follows(begun: Callable[[], Engine], cache: Path) -> None:
    """In a process that has the cache's place in its environment from the first import on."""
    repository = cache / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    _, tensors, reference, _ = char_model(repository / "snapshots" / COMMIT)

    async def check(case: Case) -> None:
        assert isinstance(case.engine, HasFolder)
        found = case.engine.folder_weights()
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(to_numpy(found[name]), to_numpy(tensor))
        for _ in range(2):
            answer = await case.engine.generate((1, 22, 33), Sampling(max_tokens=9, temperature=0.0))
            case.assert_reproduced((1, 22, 33), answer, 1.0)
            await case.load(case.next_policy())
        assert case.engine.version == 2

    with Case(begun(), tensors, reference, lambda tokens: "") as case:
        case.run(check)


@pytest.mark.full
@pytest.mark.parametrize("begun", [torch_engine, vllm_engine])
def test_a_model_named_as_in_the_cache_is_served_followed_and_adopted_as_one_in_a_folder(
    begun: Callable[[], Engine], tmp_path: Path
) -> None:
    with (
        variables(HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE="1"),
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as another,
    ):
        another.submit(answers_and_follows, begun, tmp_path).result()
