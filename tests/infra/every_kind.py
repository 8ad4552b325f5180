"""One plugin of every kind, written with `headrace` and the standard library alone. `test_sdk` runs them."""

from collections.abc import Iterator, Sequence

from headrace import (
    Chunk,
    Completion,
    ContextFull,
    Demonstration,
    Drop,
    Experience,
    Feedback,
    LoadReport,
    LossInputs,
    LossOutput,
    Memory,
    Message,
    NotInStore,
    OnChunk,
    Outcome,
    Pixels,
    Policy,
    PolicyRefused,
    Sampling,
    SchemaRefused,
    Score,
    Session,
    Span,
    Store,
    Task,
    Verdict,
    check_key,
    check_prefix,
    feedback,
    needs,
    processor,
    score,
    with_weight,
)

EOS = 0
SAYS = "yes"


@processor(version=1, memory=8)
def first_of_its_text(experience: Experience, *, memory: Memory) -> Experience | Drop:
    if experience.response in memory:
        return Drop("said before")
    memory.set(experience.response)
    return experience


@processor(version=1, inline=True)
def longest_first(group: tuple[Experience, ...]) -> tuple[Experience | Drop, ...]:
    most = max(one.num_sampled for one in group)
    return tuple(one if one.num_sampled == most else Drop("shorter") for one in group)


@processor(version=1, inline=True)
def half(batch: tuple[Experience, ...]) -> tuple[Experience, ...]:
    return tuple(with_weight(one, 0.5) for one in batch)


@score(version=1)
def polite(experience: Experience, *, word: str = "please") -> Verdict:
    return Verdict(value=float(word in experience.response), model="none")


@feedback(version=1)
def stars(event: dict[str, str]) -> Feedback | None:
    return Feedback(ref=event["answer"], id=event["id"], value=int(event["stars"]) / 5) if "stars" in event else None


def questions(*, limit: int = 2) -> Iterator[Task]:
    for number in range(limit):
        yield Task(id=f"q-{number}", messages=(Message(role="user", content=f"{number}?"),), answer=str(number))


def worked() -> Iterator[Demonstration]:
    yield Demonstration(id="q-0", messages=(Message(role="user", content="0?"),), response="0")


class Door:
    """An environment. It opens at a word."""

    def __init__(self, *, word: str = SAYS) -> None:
        self._word = word

    def reset(self, task: Task, *, seed: int) -> Outcome:
        return Outcome(observation=" knock")

    def step(self, action: str) -> Outcome:
        return Outcome(reward=float(action == self._word), end="terminal")


async def twice(task: Task, session: Session, *, again: str = "sure?") -> tuple[Score, ...]:
    """A workflow: asks, then asks again."""
    reply = await session.reply(task.messages)
    await session.reply((*task.messages, reply, Message(role="user", content=again)))
    return (Score(name="asked", value=2.0),)


def lookup(order: int, *, detail: bool = False) -> str:
    """A tool: find an order."""
    return f"order {order} is on its way" + (" by ship" if detail else "")


class Parrot:
    """An engine that says one word, whatever it is asked."""

    def __init__(self, *, model: str = "", seed: int = 0, limit: int = 100) -> None:
        self._version = 0
        self._limit = limit

    @property
    def version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self._limit

    @property
    def num_running(self) -> int:
        return 0

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def prepare(self, json_schema: str) -> None:
        raise SchemaRefused("a parrot knows no schema")

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        on_chunk: OnChunk | None = None,
        images: Sequence[Pixels] = (),
    ) -> Completion:
        tokens = (*map(ord, SAYS), EOS)
        if len(prompt) + len(tokens) > self._limit:
            raise ContextFull(f"got {len(prompt)} tokens, expected {self._limit - len(tokens)} at most")
        logprobs = (0.0,) * len(tokens)
        if on_chunk is not None:
            on_chunk(Chunk(tokens, logprobs, self._version))
        spans = (Span(start=0, stop=len(tokens), version=self._version),)
        return Completion(tokens=tokens, logprobs=logprobs, spans=spans, stopped=True)

    async def load(self, policy: Policy) -> LoadReport:
        if policy.version <= self._version:
            raise PolicyRefused(f"got version {policy.version}, expected one above {self._version}")
        self._version = policy.version
        return LoadReport(pause_ms=0.0, probe_abs_max=0.0)

    async def score_tokens(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return (0.0,) * (len(tokens) - 1)


@needs(mean="tokens", advantage=False)
def plain(inputs: LossInputs, *, scale: float = 1.0) -> LossOutput:
    return LossOutput(-scale * inputs.log_weight * inputs.advantage)


class Shelf(Store):
    """A store that keeps its objects in a dictionary."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def put(self, key: str, data: bytes) -> None:
        self._objects[check_key(key)] = bytes(data)

    def get(self, key: str) -> bytes:
        if check_key(key) not in self._objects:
            raise NotInStore(f"get {key}: not on the shelf")
        return self._objects[key]

    def read(self, key: str, start: int, length: int) -> bytes:
        return self.get(key)[start : start + length]

    def size(self, key: str) -> int:
        return len(self.get(key))

    def keys(self, prefix: str) -> Iterator[str]:
        check_prefix(prefix)
        yield from sorted(key for key in self._objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)
