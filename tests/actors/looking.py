"""An engine that remembers the pictures that it was shown."""

from collections.abc import Sequence
from typing import Any

from actors.engines.engine import Completion, OnChunk, Sampling
from actors.engines.scripted import ScriptedEngine
from infra.store.images import Pixels


class Looking(ScriptedEngine):
    """seen: of each request."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[Pixels, ...]] = []

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        self.seen.append(tuple(images))
        return await super().generate(prompt, sampling, on_chunk=on_chunk)
