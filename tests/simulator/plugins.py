"""Plugins of the simulated app: a score, a feedback source, a learner, an engine."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from actors.engines.engine import LoadReport
from actors.engines.scripted import TENSOR, ScriptedEngine
from infra.chain.processor import Drop, feedback, processor, score
from infra.model.writing import Writing
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import Tensor, from_numpy
from schemas import Experience, Feedback, Message
from trainer.batch.batch import PackedBatch
from trainer.learners.learner import StepStats
from trainer.learners.scripted import ScriptedLearner

VOCABULARY = 16
EOS = 0
TOUCHED = 6  # table entries a step changes, of 256
ENGINE_SEED = 7


@score(version=1, inline=True)
def parity(experience: Experience) -> float:
    """A verdict on the last token, so that episodes of a group differ."""
    return float(int(experience.tokens[-1]) % 2)


@processor(version=1, inline=True)
def picky(experience: Experience) -> Experience | Drop:
    """Drops about one answer in four."""
    return Drop("picky") if int(experience.tokens.sum()) % 4 == 0 else experience


@feedback(version=1)
async def csat(event: dict[str, object]) -> Feedback:
    """An event as the outside sends it."""
    return Feedback(
        ref=str(event["ref"]),
        id=str(event["id"]),
        value=float(event["value"]),  # type: ignore[arg-type]
        rater=str(event["rater"]),
    )


class SmallTokenizer:
    """A token per character, out of fifteen."""

    eos_ids = (EOS,)
    takes_tools = False
    takes_images = False
    writing = Writing()

    def encode(self, text: str) -> list[int]:
        return [1 + ord(character) % (VOCABULARY - 1) for character in text]

    def encode_chat(self, messages: Iterable[Message]) -> list[int]:
        return self.encode("".join(message.content for message in messages))

    def encode_request(
        self, conversation: Sequence[dict[str, object]], tools: Sequence[dict[str, object]]
    ) -> list[int]:
        return self.encode("".join(str(message["content"]) for message in conversation))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in ids if token != EOS)


def first_table() -> np.ndarray:
    """The model folder's weights."""
    return np.random.default_rng(ENGINE_SEED).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)


def log_softmax(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    wide -= wide.max()
    normalized: np.ndarray = wide - np.log(np.exp(wide).sum())
    return normalized


class TableLearner(ScriptedLearner):
    """The scripted learner, its hash chain written into a bigram table. stepping: told the seed before each step.

    poison_at: seeds of steps that leave a weight that is no number.
    """

    def __init__(
        self,
        stepping: Callable[[int], None] = lambda seed: None,
        fail_at: tuple[int, ...] = (),
        poison_at: tuple[int, ...] = (),
    ) -> None:
        super().__init__(fail_at=fail_at)
        self._stepping = stepping
        self._poison_at = frozenset(poison_at)
        self._table = first_table()

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        """Change a few entries of the table, as a function of the batch."""
        self._stepping(seed)
        stats = super().step(batch, learning_rate=learning_rate, seed=seed, max_grad_norm=max_grad_norm)
        if stats.finite:
            bits = np.frombuffer(super().tensors()["weights"].data, "<u4")
            flat = self._table.copy().reshape(-1)
            places = (bits[:TOUCHED] >> 7) % flat.size
            flat[places] = (bits[:TOUCHED] & 0x3FF).astype(np.float32) / 256 - 2
            flat[places[:1]] = np.nan if seed in self._poison_at else flat[places[:1]]
            self._table = flat.reshape(self._table.shape)
        return stats

    def tensors(self) -> dict[str, Tensor]:
        """The table."""
        return {TENSOR: from_numpy(self._table)}

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        """Logprobs under the table."""
        return Probe(sequences=sequences, logprobs=tuple(logprobs_of(self._table, item) for item in sequences))

    def save(self) -> dict[str, Tensor]:
        """The scripted state and the table."""
        chain = super().tensors() | {name: tensor for name, tensor in super().save().items() if name == "steps"}
        return chain | {"table": from_numpy(self._table)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `save`."""
        super().restore({name: tensor for name, tensor in state.items() if name != "table"})
        self._table = np.frombuffer(state["table"].data, "<f4").reshape(VOCABULARY, VOCABULARY).copy()


def logprobs_of(table: np.ndarray, tokens: Sequence[int]) -> tuple[float, ...]:
    """Logprob of every token but the first."""
    return tuple(float(log_softmax(table[before])[token]) for before, token in pairwise(tokens))


class WatchedEngine(ScriptedEngine):
    """The scripted engine. loaded: called after each load with the version and weights that it serves."""

    def __init__(self, loaded: Callable[[int, Mapping[str, Tensor]], None], *, seed: int, token_s: float) -> None:
        super().__init__(seed=seed, num_vocabulary=VOCABULARY, token_s=token_s)
        self._loaded = loaded

    async def start(self) -> None:
        """Begin with the model folder's weights, with any seed of the samples."""
        await super().start()
        self._table = first_table()

    async def load(self, policy: Policy) -> LoadReport:
        """Swap, then tell."""
        report = await super().load(policy)
        self._loaded(policy.version, self.tensors)
        return report
