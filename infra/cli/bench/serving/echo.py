"""An engine that costs next to nothing, so that what is measured is the way to it and back.

A whole answer is there at once. Of streamed ones each gets a token at every step, as from an engine with a batch.
"""

import asyncio
from collections.abc import Sequence

from actors.engines.engine import Chunk, Completion, OnChunk, Sampling
from actors.engines.scripted import ScriptedEngine
from infra.store.images import Pixels
from schemas import Span

STEP_S = 0.01


class EchoEngine(ScriptedEngine):
    """Says the same tokens to every prompt, as many as there are. stopped: as if the last of them ended it."""

    def __init__(self, tokens: Sequence[int], step_s: float = STEP_S, *, stopped: bool = False) -> None:
        super().__init__(max_model_len=10**6)
        self._chunks = [Chunk((token,), (-0.5,), 0) for token in tokens]
        self._whole = Completion(
            tokens=tuple(tokens),
            logprobs=(-0.5,) * len(tokens),
            spans=(Span(start=0, stop=len(tokens), version=0),),
            stopped=stopped,
        )
        self._step_s = step_s
        self._streams: dict[asyncio.Future[None], tuple[OnChunk, int]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        """The same tokens for every request."""
        if on_chunk is None:
            await asyncio.sleep(0)
            return self._whole
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams[done] = on_chunk, 0
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step())
        try:
            await done
        finally:
            self._streams.pop(done, None)
        return self._whole

    async def _step(self) -> None:
        """A token to each, until all are given."""
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while self._streams:
            due_s = max(due_s + self._step_s, clock())
            await asyncio.sleep(due_s - clock())
            for done, (on_chunk, at) in list(self._streams.items()):
                on_chunk(self._chunks[at])
                self._streams[done] = on_chunk, at + 1
                if at + 1 == len(self._chunks):
                    del self._streams[done]
                    if not done.done():
                        done.set_result(None)
        self._stepping = None
