"""Work and what ends it early: whichever comes first decides, and the work has let go by then."""

import asyncio

import pytest

from infra.roles.unless import unless


class Ended(Exception):
    """What happened came first."""


async def worked(release: asyncio.Event, let_go: list[str], fails: bool = False) -> str:
    try:
        await release.wait()
        return "done"
    finally:
        await asyncio.sleep(0)
        let_go.append("let go")
        if fails:
            raise OSError("in the middle of letting go")


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_is_overtaken_has_let_go_before_anybody_is_told(fails: bool) -> None:
    async def check() -> None:
        let_go: list[str] = []
        with pytest.raises(Ended):
            await unless(asyncio.sleep(0), worked(asyncio.Event(), let_go, fails), Ended)
        assert let_go == ["let go"]

    asyncio.run(check())


def test_work_that_ends_first_is_the_result_and_its_error_the_error() -> None:
    async def check() -> None:
        released = asyncio.Event()
        released.set()
        assert await unless(asyncio.Event().wait(), worked(released, []), Ended) == "done"
        with pytest.raises(OSError, match="letting go"):
            await unless(asyncio.Event().wait(), worked(released, [], fails=True), Ended)

    asyncio.run(check())


def test_whoever_is_cancelled_meanwhile_takes_the_work_along() -> None:
    async def check() -> None:
        let_go: list[str] = []
        waiting = asyncio.create_task(unless(asyncio.Event().wait(), worked(asyncio.Event(), let_go), Ended))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert let_go == ["let go"]

    asyncio.run(check())
