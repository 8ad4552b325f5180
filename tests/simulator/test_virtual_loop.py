"""The loop plays many processes: time jumps, the dead are silent, the stalled go on where they were."""

import asyncio
from random import Random

import pytest

from tests.simulator.virtual_loop import START_S, Process, Stuck, VirtualLoop


def test_time_jumps_to_the_next_timer() -> None:
    loop = VirtualLoop(Random(0))
    loop.run_until_complete(asyncio.sleep(86_400))
    assert loop.time() == pytest.approx(START_S + 86_400)


def test_a_dead_process_does_nothing_more() -> None:
    loop, process, done = VirtualLoop(Random(0)), Process("a"), []

    async def work() -> None:
        for step in range(10):
            await asyncio.sleep(1)
            done.append(step)

    async def main() -> None:
        loop.create_task(work(), context=process.context)
        await asyncio.sleep(3.5)
        process.is_dead = True
        await asyncio.sleep(30)

    loop.run_until_complete(main())
    loop.abandon()
    assert done == [0, 1, 2]


def test_a_stalled_process_goes_on_where_it_was() -> None:
    loop, process, done = VirtualLoop(Random(0)), Process("a"), []

    async def work() -> None:
        await asyncio.sleep(1)
        done.append(loop.time() - START_S)
        await asyncio.sleep(1)
        done.append(loop.time() - START_S)

    async def main() -> None:
        loop.create_task(work(), context=process.context)
        await asyncio.sleep(0.5)
        process.is_stalled = True
        await asyncio.sleep(10)
        assert not done
        loop.resume(process)
        await asyncio.sleep(5)

    loop.run_until_complete(main())
    assert done == pytest.approx([10.5, 11.5])


def test_processes_are_shuffled_and_each_keeps_its_order() -> None:
    orders = set()
    for seed in range(20):
        loop, ran = VirtualLoop(Random(seed)), []
        contexts = [Process(name).context for name in "ab"]

        async def main(loop: VirtualLoop, ran: list, contexts: list) -> None:  # type: ignore[type-arg]
            for number in range(2):
                for index, context in enumerate(contexts):
                    loop.call_soon(ran.append, (index, number), context=context)
            await asyncio.sleep(1)

        loop.run_until_complete(main(loop, ran, contexts))
        assert [one for one in ran if one[0] == 0] == [(0, 0), (0, 1)]
        orders.add(tuple(ran))
    assert len(orders) > 2


def test_waiting_for_nothing_is_said() -> None:
    loop = VirtualLoop(Random(0))
    with pytest.raises(Stuck):
        loop.run_until_complete(loop.create_future())
