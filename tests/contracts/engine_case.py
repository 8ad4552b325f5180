"""Cases of the engine contract: engines, each with the tensors it serves and a way of its own to compute logprobs."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from actors.engines.engine import Completion, Engine, KvMode
from actors.engines.scripted import TENSOR, ScriptedEngine
from actors.engines.vllm.engine import in_a_file
from infra.model.model import load_tokenizer
from infra.policies.policy import Policy, Probe
from infra.policies.tensors import Tensor, from_numpy, to_numpy

Tensors = dict[str, Tensor]
Reference = Callable[[Tensors, Sequence[int], float], list[float]]
# As Reference, where keys and values are kept: of (tensors, index of the last token they sampled) one after the other.
Kept = Callable[[Sequence[tuple[Tensors, int]], Sequence[int], float], list[float]]


class Started:
    """An engine under test, started for the length of a block, with an event loop of its own."""

    engine: Engine

    def run(self, call: Callable[[Any], Any]) -> Any:
        return self.runner.run(asyncio.wait_for(call(self), 120))

    def __enter__(self) -> Self:
        self.runner = asyncio.Runner()
        self.runner.run(self.engine.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


class Case(Started):
    """An engine under test, the tensors it serves, and independent ways to compute logprobs from tensors."""

    def __init__(
        self,
        engine: Engine,
        tensors: Tensors,
        reference: Reference,
        text: Callable[[Sequence[int]], str],
        kept: Kept | None = None,
    ) -> None:
        self.engine = engine
        self.text = text
        self.reference = reference
        self.kept = kept
        self.by_version = {0: tensors}
        self.newest = 0  # a refused version is not used again

    @property
    def tensors(self) -> Tensors:
        return self.by_version[self.engine.version]

    def next_policy(self, *, scale: float = 1.02, only: str = "", probe: bool = True) -> Policy:
        """The served policy with every matrix (or those whose name holds `only`) scaled."""
        tensors = {
            name: from_numpy(to_numpy(tensor) * np.float32(scale)) if only in name and len(tensor.shape) > 1 else tensor
            for name, tensor in self.tensors.items()
        }
        return self.policy(tensors, probe=probe)

    def policy(self, tensors: Tensors, *, probe: bool = True) -> Policy:
        self.newest += 1
        prefix = (1, *(20 + index % 60 for index in range(150)))  # longer than a block of a prefix cache
        sequences = ((1, 20, 30, 40, 50), (1, 7, 9), (*prefix, 30), (*prefix, 31, 32))
        made = Probe(sequences, tuple(tuple(self.reference(tensors, tokens, 1.0)) for tokens in sequences))
        lying = dict(tensors)
        if (files := getattr(self.engine, "version_files", None)) is not None:
            lying = in_a_file(files, tensors)
        return Policy(version=self.newest, tensors=lying, probe=made if probe else None)

    async def load(self, policy: Policy) -> None:
        await self.engine.load(policy)
        self.by_version[policy.version] = dict(policy.tensors)

    def assert_reproduced(self, prompt: Sequence[int], completion: Completion, temperature: float) -> None:
        """Every span's logprobs are its own version's, given the whole prefix; where the span names older keys and values,
        given the keys and values that the spans before it left.
        """
        tokens = [*prompt, *completion.tokens]
        stop = 0
        for index, span in enumerate(completion.spans):
            assert span.start == stop
            stop = span.stop
            at = len(prompt) - 1
            if span.kv >= 0:
                assert self.kept is not None
                past = [number for number in range(index) if completion.spans[number].kv < 0]
                before = completion.spans[max(past, default=0) : index + 1]
                runs = [(self.by_version[item.version], len(prompt) + item.stop - 1) for item in before]
                expected = self.kept(runs, tokens, temperature)
            else:
                expected = self.reference(self.by_version[span.version], tokens, temperature)
            np.testing.assert_allclose(
                completion.logprobs[span.start : span.stop],
                expected[at + span.start : at + span.stop],
                atol=1e-4,
                rtol=0,
            )
        assert stop == len(completion.tokens) == len(completion.logprobs)


def scripted(_: Path, kv: KvMode = "rebuild") -> Case:
    engine = ScriptedEngine(seed=3, num_vocabulary=128, max_model_len=512, kv=kv)
    random = np.random.default_rng(3)
    tensors = {TENSOR: from_numpy(random.normal(size=(128, 128)).astype(np.float32))}

    def reference(tensors: Tensors, tokens: Sequence[int], temperature: float) -> list[float]:
        table = np.exp(to_numpy(tensors[TENSOR]).astype(np.float64) / temperature)
        return [float(np.log(table[a, b] / table[a].sum())) for a, b in itertools.pairwise(tokens)]

    def kept(runs: Sequence[tuple[Tensors, int]], tokens: Sequence[int], temperature: float) -> list[float]:
        return reference(runs[-1][0], tokens, temperature)

    return Case(engine, tensors, reference, lambda tokens: bytes(tokens).decode(), kept)


def char_model(folder: Path) -> tuple[Path, Tensors, Reference, Kept]:
    """The demo's model, widened so that its distributions are far from uniform, and transformers forwards over it."""
    import torch

    from infra.cli.demo.char_model import build_char_model
    from infra.model.model import load_into, load_model, model_tensors
    from infra.policies.tensors import save_tensors

    build_char_model(folder, seed=5)
    model = load_model(str(folder))
    tensors = {
        name: from_numpy(to_numpy(tensor) * np.float32(4)) if len(tensor.shape) > 1 else tensor
        for name, tensor in model_tensors(model).items()
    }
    (folder / "model.safetensors").write_bytes(save_tensors(tensors, {"format": "pt"}))

    def reference(tensors: Tensors, tokens: Sequence[int], temperature: float) -> list[float]:
        load_into(model, tensors)
        ids = torch.tensor([list(tokens)])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0] / temperature, -1)
        return [float(logprob) for logprob in logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]]

    def kept(runs: Sequence[tuple[Tensors, int]], tokens: Sequence[int], temperature: float) -> list[float]:
        """Each token was sampled after the one before it was read, under the same tensors."""
        cache, read, found = None, 0, []
        for tensors, last in runs:
            load_into(model, tensors)
            with torch.no_grad():
                output = model(input_ids=torch.tensor([tokens[read:last]]), past_key_values=cache, use_cache=True)
            logprobs = torch.log_softmax(output.logits[0] / temperature, -1)
            following = torch.tensor(tokens[read + 1 : last + 1])
            found += logprobs.gather(1, following[:, None])[:, 0].tolist()
            cache, read = output.past_key_values, last
        return [*found, *[float("nan")] * (len(tokens) - 1 - len(found))]

    return folder, tensors, reference, kept


def torch_case(folder: Path, kv: KvMode = "rebuild") -> Case:
    from actors.engines.torch import TorchEngine

    model, tensors, reference, kept = char_model(folder)
    engine = TorchEngine(model=str(model), seed=3, kv=kv)
    return Case(engine, tensors, reference, load_tokenizer(model).decode, kept)


def vllm_case(folder: Path, kv: KvMode = "rebuild") -> Case:
    from actors.engines.vllm.engine import VllmEngine

    model, tensors, reference, kept = char_model(folder)
    engine = VllmEngine(model=str(model), seed=3, max_num_seqs=64, max_num_batched_tokens=512, kv=kv)
    return Case(engine, tensors, reference, load_tokenizer(model).decode, kept)
