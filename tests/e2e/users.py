"""Users of a few gateways, who ask as through a balancer and say what every other answer was worth.

A gateway that accepts no connection is passed over for the next one. Nothing else is tried again: what is refused, fails or is
cut off counts.
"""

import asyncio
from typing import Any, Self

import httpx

from schemas.ids import ANSWER_PREFIX

ASK_S = 30.0
NUM_RATERS = 200
BODY = {"model": "main", "messages": [{"role": "user", "content": "37+45="}], "max_tokens": 6}


class UserCrowd:
    """Also a context manager. gateways: who is asked, in turn. held: ids of answers they were given. failed: what they were
    told instead, cut_off: without a word.
    """

    def __init__(self, key: str) -> None:
        self.gateways: list[str] = []
        self.held: set[str] = set()
        self.failed: list[str] = []
        self.asked = self.cut_off = 0
        self._gone = False
        # No connection is kept: one that its gateway ends as it is used again would be no fault of the gateway's.
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"},
            timeout=ASK_S,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def come(self, per_s: float) -> None:
        """Ask until they are to leave; all that was begun has ended then."""
        async with asyncio.TaskGroup() as group:
            while not self._gone:
                self.asked += 1
                group.create_task(self._visit(self.asked))
                await asyncio.sleep(1.0 / per_s)

    def leave(self) -> None:
        """Begin nothing new."""
        self._gone = True

    async def answered(self, more: int) -> None:
        """Until they hold so many more answers."""
        wanted = len(self.held) + more
        async with asyncio.timeout(4 * ASK_S):
            while len(self.held) < wanted:  # noqa: ASYNC110 (it is looked at from within one loop)
                await asyncio.sleep(0.05)

    async def look(self, gateway: str) -> None:
        """Ask a gateway how it is. It accepts connections in their order: those of before are accepted by the answer."""
        (await self._http.get(f"{gateway}/healthz")).raise_for_status()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _visit(self, number: int) -> None:
        answer = await self._post("/v1/chat/completions", BODY, 200, number)
        if answer is None:
            return
        self.held.add(answer["id"].removeprefix(ANSWER_PREFIX))
        if number % 2:
            said = {"answer_id": answer["id"], "value": number % 4 // 2, "rater": f"user-{number % NUM_RATERS}"}
            await self._post("/v1/feedback", said, 202, number)

    async def _post(self, path: str, body: object, expected: int, number: int) -> dict[str, Any] | None:
        first = number % max(1, len(self.gateways))
        for gateway in (*self.gateways[first:], *self.gateways[:first]):
            try:
                response = await self._http.post(f"{gateway}{path}", json=body)
            except httpx.ConnectError:  # it takes no more: the next one's turn
                continue
            except httpx.TransportError:
                self.cut_off += 1
                return None
            if response.status_code == expected:
                answer: dict[str, Any] = response.json()
                return answer
            self.failed.append(f"{path}: {response.status_code} {response.text[:200]}")
            return None
        self.failed.append(f"{path}: no gateway accepts")
        return None
