"""What vLLM says of experts, without vLLM: asked of it, refused where it cannot, and put together for one completion."""

import asyncio

import numpy as np
import pytest

from actors.engines.engine import Sampling
from actors.engines.vllm.adapters import Attempts
from actors.engines.vllm.requests import Requests, RoutedRows, layers_that_route
from actors.engines.vllm.settings import routing_options
from schemas.errors import ConfigError
from tests.actors.engines.test_vllm_parts import FakeVllm, answered

KNOWN = frozenset({"enable_return_routed_experts"})


def test_routing_is_asked_of_a_gpu_build_and_refused_on_a_cpu_by_name() -> None:
    assert routing_options(False, on_cpu=True, known=frozenset()) == {}
    assert routing_options(True, on_cpu=False, known=KNOWN) == {"enable_return_routed_experts": True}
    with pytest.raises(ConfigError, match=r"engine\.options\.routing: .*Model Runner V2 requires Triton.*TorchEngine"):
        routing_options(True, on_cpu=True, known=KNOWN)
    with pytest.raises(ConfigError, match="returns no experts"):
        routing_options(True, on_cpu=False, known=frozenset())


def test_layers_without_experts_are_left_out() -> None:
    names = [
        f"model.layers.{layer}.mlp.{what}.weight" for layer in (0, 10, 2) for what in ("gate", "experts.1.up_proj")
    ]
    assert layers_that_route([*names, "model.layers.3.mlp.shared_expert.up_proj.weight", "lm_head.weight"]) == (
        0,
        2,
        10,
    )


def rows(start: int, stop: int, *, layers: int = 3, k: int = 2) -> np.ndarray:
    """Rows that say which token they are of."""
    return np.broadcast_to(np.arange(start, stop, dtype=np.uint8)[:, None, None], (stop - start, layers, k)).copy()


def test_a_completion_over_several_requests_keeps_what_its_own_tokens_were_sampled_with() -> None:
    async def check() -> None:
        llm, attempts = FakeVllm(), Attempts()
        requests = Requests(
            llm,
            attempts,
            group_max_tokens=64,
            routed_layers=(0, 2),
            sampling_params=lambda sampling, num: (sampling, num),
        )
        old, bad = attempts.begin(3, proved=True), attempts.begin(4)
        call = asyncio.create_task(requests.generate((5, 6), Sampling(max_tokens=4)))
        _, _, queue = await llm.next()
        attempts.decide(bad, False)
        first = answered(([1, 2, 3, 4], [(old, 0, 2), (bad, 2, 4)]))
        first.outputs[0].routed_experts = rows(0, 5)
        queue.answer.set_result(first)
        prompt, _, queue = await llm.next()
        assert prompt == [5, 6, 1, 2]
        second = answered(([7, 8], [(old, 0, 2)]))
        second.outputs[0].routed_experts = rows(100, 105)
        queue.answer.set_result(second)
        found = (await call).routing
        assert found.dtype == np.uint8 and found.shape == (5, 2, 2)
        assert found[:, 0, 0].tolist() == [0, 1, 2, 103, 104], "5, 6 and 1 as they were when 1 and 2 were sampled"

    asyncio.run(check())


@pytest.mark.parametrize("given", [None, rows(0, 3)])
def test_what_vllm_does_not_give_whole_is_not_given_on(given) -> None:
    routed = RoutedRows((0,))
    routed.add(rows(0, 3), 3)
    routed.add(given, 4)
    assert routed.all() is None
    assert RoutedRows().all() is None
