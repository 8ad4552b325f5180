"""The scripted engine's pace is that of a model which runs elsewhere: the event loop's other work does not slow it."""

from random import Random

import pytest

from actors.engines.engine import Chunk, Sampling
from actors.engines.scripted import ScriptedEngine
from tests.simulator.virtual_loop import VirtualLoop


def test_a_token_that_is_given_late_delays_no_other() -> None:
    loop = VirtualLoop(Random(0))

    def busy(chunk: Chunk) -> None:
        loop.now_s += 0.09

    async def timed() -> float:
        engine = ScriptedEngine(token_s=0.1)
        await engine.start()
        begin_s = loop.time()
        await engine.generate((1,), Sampling(max_tokens=20), on_chunk=busy)
        return loop.time() - begin_s

    assert loop.run_until_complete(timed()) == pytest.approx(20 * 0.1 + 0.09)
    loop.close()
