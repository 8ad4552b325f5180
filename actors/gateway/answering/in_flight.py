"""One request while it is served, and the sampling of its choices."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from actors.engines.engine import Engine, Sampling
from actors.gateway.access.keys import ApiKey
from actors.gateway.access.places import TakenPlaces
from actors.gateway.answering.conversation import Called, read_calls
from actors.gateway.answering.sample import Decode, Growing, OnText, SampledAnswer, sample, sample_whole
from actors.gateway.http.requests import ParsedRequest

Watch = Callable[[int], OnText]  # gives the listener of a choice


class InFlight(msgspec.Struct, kw_only=True):
    """One request while it is served. place: for its answers. session: "" where the client
    named none. trial: the version on trial, -1 where none is or the request was not drawn for it. subject: the user
    whose key it is sealed under, "" for none. reason: why it does not go on from earlier turns. failed: by the engine.
    """

    place: TakenPlaces
    request: ParsedRequest
    key: ApiKey
    group: str
    session: str
    answer_ids: list[str]
    rendered: list[int]
    tokens: list[int]
    prefix: list[int]
    turn: int
    sampling: Sampling
    trial: int
    subject: str
    reason: str = ""
    growing: list[Growing | None] = []
    answers: list[SampledAnswer] = []
    failed: bool = False

    @property
    def num_sampled(self) -> int:
        """Tokens of all choices."""
        return sum(len(answer.tokens) for answer in self.answers)

    def content(self, index: int, tools: bool) -> tuple[str, list[Called]]:
        """Text and tool calls of a choice that has ended."""
        text = self.request.force + self.answers[index].text
        return read_calls(text) if tools else (text, [])


async def sample_choices(engine: Engine, decode: Decode, in_flight: InFlight, watch: Watch | None) -> None:
    """Sample all choices into `in_flight`; cancelled, what there is stays in its `growing`."""
    request = in_flight.request
    in_flight.growing = [_growing(decode, in_flight, index, watch) for index in range(request.choices)]
    if request.choices == 1:
        in_flight.answers = [await _choice(engine, decode, in_flight, 0)]
        return
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_choice(engine, decode, in_flight, index)) for index in range(request.choices)]
    in_flight.answers = [task.result() for task in tasks]


def _growing(decode: Decode, in_flight: InFlight, index: int, watch: Watch | None) -> Growing | None:
    if watch is None and not in_flight.request.stops:
        return None
    tell = watch(index) if watch is not None else _unheard
    return Growing(decode, in_flight.sampling, in_flight.request.stops, tell)


def _choice(engine: Engine, decode: Decode, in_flight: InFlight, index: int) -> Coroutine[Any, Any, SampledAnswer]:
    sampling, growing = in_flight.sampling, in_flight.growing[index]
    if sampling.seed is not None:
        sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + index) & (2**63 - 1))
    if growing is None:
        return sample_whole(engine, decode, in_flight.tokens, sampling)
    return sample(engine, growing, in_flight.tokens, sampling)


def _unheard(piece: str, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """For an answer that is not streamed."""
