"""Whether a client is still there: the task that works for it is told, and nothing of the work is left behind."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect

from actors.gateway.gone import Gone


class Work:
    """Work that says what became of it. swallows: it ends well though it was cancelled. fails: it ends otherwise."""

    def __init__(self, *, swallows: bool = False, fails: bool = False) -> None:
        self.began, self.goes_on, self.let_go = asyncio.Event(), asyncio.Event(), False
        self._swallows, self._fails = swallows, fails

    async def run(self) -> str:
        self.began.set()
        try:
            await self.goes_on.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # letting go takes a moment
            self.let_go = True
            if self._fails:
                raise RuntimeError("it broke while it let go") from None
            if not self._swallows:
                raise
        return "done"


def _gone() -> Gone:
    return Gone(lambda: None)


def test_work_whose_client_stays_gives_its_result() -> None:
    async def act() -> None:
        work, listened = Work(), list[bool]()
        work.goes_on.set()
        assert await Gone(lambda: listened.append(True)).unless(work.run(), ClientDisconnect) == "done"
        assert listened == [True], "a paused connection would not say that its client goes"

    asyncio.run(act())


@pytest.mark.parametrize(
    "kind", [{}, {"swallows": True}, {"fails": True}], ids=["it ends", "it ends well", "it fails meanwhile"]
)
def test_work_whose_client_goes_is_cancelled_and_has_let_go_before_anything_else_is_done(kind: dict[str, bool]) -> None:
    async def act() -> None:
        gone, work = _gone(), Work(**kind)

        async def serve() -> str:
            with pytest.raises(ClientDisconnect):
                await gone.unless(work.run(), ClientDisconnect)
            assert work.let_go
            await asyncio.sleep(0)  # what follows is not cancelled
            return "served"

        serving = asyncio.create_task(serve())
        await work.began.wait()
        gone.happen()
        gone.happen()
        assert await serving == "served" and not serving.cancelling()

    asyncio.run(act())


def test_work_of_a_client_that_has_gone_before_is_begun_and_cancelled() -> None:
    async def act() -> None:
        gone, work = _gone(), Work()
        gone.happen()
        with pytest.raises(ClientDisconnect):
            await gone.unless(work.run(), ClientDisconnect)
        assert work.began.is_set() and work.let_go

    asyncio.run(act())


@pytest.mark.parametrize("goes", [False, True])
def test_a_task_that_others_cancel_ends_so_whether_the_client_goes_or_not(goes: bool) -> None:
    async def act() -> None:
        gone, work = _gone(), Work()
        serving = asyncio.create_task(gone.unless(work.run(), ClientDisconnect))
        await work.began.wait()
        if goes:
            gone.happen()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert work.let_go

    asyncio.run(act())


def test_what_fails_by_itself_says_why() -> None:
    async def fails() -> None:
        raise ValueError("mistake")

    with pytest.raises(ValueError, match="mistake"):
        asyncio.run(_gone().unless(fails(), ClientDisconnect))


def test_the_next_request_of_the_connection_is_told_too() -> None:
    async def act() -> None:
        gone, first, second = _gone(), Work(), Work()
        first.goes_on.set()
        assert await gone.unless(first.run(), ClientDisconnect) == "done"
        serving = asyncio.create_task(gone.unless(second.run(), ClientDisconnect))
        await second.began.wait()
        gone.happen()
        with pytest.raises(ClientDisconnect):
            await serving
        assert second.let_go and not first.let_go

    asyncio.run(act())
