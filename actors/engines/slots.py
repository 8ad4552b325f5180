"""Continuous batching over a transformers model: running sequences in slots, keys and values in one tensor a layer.

A sequence enters after a forward over its prompt (equal prompts are forwarded once), leaves at its last token, and the
last slot moves into its place. `rebuild` recomputes every running sequence's keys and values, for new weights. If it is not
called after new weights, sequences continue with their old keys and values, and record the oldest version of these.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from actors.engines.engine import OnChunk, nucleus, shaped_logits
from actors.engines.grammar import Matcher
from actors.engines.trace import RequestImages, Trace
from infra.model.vision import Vision, model_inputs

SLOT_STEP = 64  # sequences are stored in multiples of so many tokens
REBUILD_TOKENS = 16384  # most tokens of one forward while rebuilding

Input = tuple[tuple[int, ...], RequestImages]  # tokens, and the images at the image tokens among them


class RunningSequence:
    def __init__(
        self,
        prompt: tuple[int, ...],
        trace: Trace,
        generator: torch.Generator | None,
        on_chunk: OnChunk | None = None,
        pictures: RequestImages | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.prompt = prompt
        self.matcher = matcher
        self.pictures = pictures or RequestImages()
        self.trace = trace
        self.generator = generator
        self.on_chunk = on_chunk
        self.cancelled = False
        self.is_stuck = False  # the grammar allows no further token
        self.kv_version = -1  # oldest version of its keys and values

    def add(self, token: int, logprob: float, version: int) -> bool:
        """Record a token; True where it ends the sequence."""
        if self.matcher is not None:
            self.matcher.take(token)
            self.is_stuck = self.matcher.stuck
        return self.trace.add(token, logprob, version, self.kv_version) or self.is_stuck


class _Captured:
    """A cache that keeps and returns the given keys and values: for a forward over whole sequences."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        self.layers.append((keys, values))
        return keys, values


class _Slots:
    """Keys and values of running sequences, per layer [slots, heads, capacity, head_dim], allocated on first use."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.positions = torch.zeros(0, dtype=torch.long)  # [B] where this step's token of each row goes
        self.width = 0

    def update(self, keys_BH1D: Tensor, values_BH1D: Tensor, layer: int, *_: object) -> tuple[Tensor, Tensor]:
        num_rows = len(self.positions)
        rows = torch.arange(num_rows, device=keys_BH1D.device)
        self.keys[layer][rows, :, self.positions] = keys_BH1D[:, :, 0]
        self.values[layer][rows, :, self.positions] = values_BH1D[:, :, 0]
        return self.keys[layer][:num_rows, :, : self.width], self.values[layer][:num_rows, :, : self.width]

    def reserve(self, layers: list[tuple[Tensor, Tensor]], num_slots: int, num_tokens: int) -> None:
        if not self.keys:
            self.keys = [keys.new_zeros(0, keys.shape[1], 0, keys.shape[3]) for keys, _ in layers]
            self.values = [values.new_zeros(0, values.shape[1], 0, values.shape[3]) for _, values in layers]
        old_slots, _, old_tokens, _ = self.keys[0].shape
        if num_slots <= old_slots and num_tokens <= old_tokens:
            return
        slots = max(old_slots, 1 << (num_slots - 1).bit_length())
        tokens = max(old_tokens, -(-num_tokens // SLOT_STEP) * SLOT_STEP)
        for stored in (self.keys, self.values):
            for layer, old in enumerate(stored):
                stored[layer] = old.new_zeros(slots, old.shape[1], tokens, old.shape[3])
                stored[layer][:old_slots, :, :old_tokens] = old

    def write(self, layers: list[tuple[Tensor, Tensor]], start: int, which: Tensor) -> None:
        """Put sequences `which` of a captured forward into slots from `start` on."""
        for layer, (keys, values) in enumerate(layers):
            length = keys.shape[2]
            self.keys[layer][start : start + len(which), :, :length] = keys[which]
            self.values[layer][start : start + len(which), :, :length] = values[which]

    def move(self, sources: list[int], targets: list[int]) -> None:
        for stored in (self.keys, self.values):
            for tensor in stored:
                tensor[targets] = tensor[sources]


class RunningBatch:
    """The sequences being sampled. Not for concurrent use."""

    def __init__(self, model: Any, generator: torch.Generator, vision: Vision | None = None) -> None:
        self.rows: list[RunningSequence] = []
        self._vision = vision
        self._model = model
        self._generator = generator
        self._slots = _Slots()

    def admit(self, rows: Sequence[RunningSequence], version: int) -> list[RunningSequence]:
        """Start sequences and sample their first token. Returns the sequences that are finished already."""
        finished: list[RunningSequence] = []
        by_length: dict[int, list[RunningSequence]] = {}
        for row in rows:
            by_length.setdefault(len(row.prompt), []).append(row)
        for group in by_length.values():
            prompts = list(dict.fromkeys((row.prompt, row.pictures) for row in group))
            index = {prompt: position for position, prompt in enumerate(prompts)}
            which = torch.tensor([index[row.prompt, row.pictures] for row in group])
            for row, position in zip(group, which.tolist(), strict=True):
                row.pictures = prompts[position][1]  # equal ones are prepared once
            layers, logits = self._forward(prompts)
            start = len(self.rows)
            for row in group:
                row.kv_version = version
            num_tokens = max(len(row.prompt) + row.trace.sampling.max_tokens for row in group)
            self._slots.reserve(layers, start + len(group), num_tokens)
            self._slots.write(layers, start, which)
            self.rows += group
            finished += self._sample(start, logits[which], version)
        return finished

    def step(self, version: int) -> list[RunningSequence]:
        """Sample one more token for every sequence. Returns the finished sequences."""
        rows = self.rows
        positions = [len(row.prompt) + len(row.trace.tokens) - 1 for row in rows]
        slots = self._slots
        slots.positions, slots.width = torch.tensor(positions), max(positions) + 1
        mask = self._masks(slots.positions[:, None, None], torch.arange(slots.width))
        logits = self._model(
            input_ids=torch.tensor([[row.trace.tokens[-1]] for row in rows]),
            position_ids=slots.positions[:, None],
            attention_mask=mask,
            past_key_values=slots,
            use_cache=True,
        ).logits[:, -1]
        return self._sample(0, logits, version)

    def remove_cancelled(self) -> None:
        """Free the slots of cancelled sequences."""
        self._remove({index for index, row in enumerate(self.rows) if row.cancelled})

    def rebuild(self, version: int) -> None:
        """Recompute keys and values of all running sequences under the model's present weights, of `version`."""
        for row in self.rows:
            row.kv_version = version
        start = 0
        while start < len(self.rows):
            longest, stop = 0, start
            while stop < len(self.rows):
                length = len(self.rows[stop].prompt) + len(self.rows[stop].trace.tokens) - 1
                longest = max(longest, length)
                if stop > start and longest * (stop + 1 - start) > REBUILD_TOKENS:
                    break
                stop += 1
            sequences = [((*row.prompt, *row.trace.tokens[:-1]), row.pictures) for row in self.rows[start:stop]]
            unique = list(dict.fromkeys(sequences))
            index = {sequence: position for position, sequence in enumerate(unique)}
            layers, _ = self._forward(unique)
            self._slots.write(layers, start, torch.tensor([index[sequence] for sequence in sequences]))
            start = stop

    def _forward(self, sequences: Sequence[Input]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        length = max(len(tokens) for tokens, _ in sequences)
        padded = torch.zeros(len(sequences), length, dtype=torch.long)  # causal attention sees no padding at the end
        for index, (tokens, _) in enumerate(sequences):
            padded[index, : len(tokens)] = torch.tensor(tokens)
        captured = _Captured()
        logits = self._model(
            **self._inputs(sequences, padded),
            position_ids=torch.arange(length)[None],
            attention_mask=self._masks(torch.arange(length)[None, :, None], torch.arange(length)),
            past_key_values=captured,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return captured.layers, logits

    def _masks(self, query_BQ1: Tensor, key_K: Tensor) -> Any:
        """Attention masks in the form that the model's layers take. query_BQ1, key_K: positions."""
        config = self._model.config.get_text_config()
        kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
        seen_BQK = key_K <= query_BQ1
        near_BQK = seen_BQK & (key_K > query_BQ1 - window) if window else seen_BQK
        if kinds is None:
            return self._mask(near_BQK)
        if "sliding_attention" not in kinds:
            return self._mask(seen_BQK)
        return {"full_attention": self._mask(seen_BQK), "sliding_attention": self._mask(near_BQK)}

    def _mask(self, seen_BQK: Tensor) -> Tensor:
        """[B, 1, Q, K]: True for visible keys; for eager attention, which takes no booleans, values to add to the scores."""
        seen_B1QK = seen_BQK[:, None]
        if self._model.config._attn_implementation != "eager":
            return seen_B1QK
        dtype = self._model.dtype
        return torch.zeros(seen_B1QK.shape, dtype=dtype).masked_fill(~seen_B1QK, torch.finfo(dtype).min)

    def _inputs(self, sequences: Sequence[Input], padded: Tensor) -> Mapping[str, Tensor]:
        """Inputs of the model's forward: tokens, with the features of their images where there are any."""
        places = pictures = None
        vision, length = self._vision, padded.shape[1]
        if vision is not None and any(pictured.images for _, pictured in sequences):
            pictures = np.stack(
                [pictured for _, prompt_images in sequences for pictured in prompt_images.prepared(vision)]
            )
            found = [vision.places(tokens, len(pictured.images)) for tokens, pictured in sequences]
            places = np.concatenate([at + index * length for index, at in enumerate(found)])
        return model_inputs(self._model, padded, places, pictures)

    def _sample(self, start: int, logits: Tensor, version: int) -> list[RunningSequence]:
        """Record one token for each row from `start` on; remove and return the finished."""
        rows = self.rows[start:]
        temperatures = torch.tensor([row.trace.sampling.temperature for row in rows])
        greedy = temperatures == 0
        logits = _masked(_shaped(logits.float(), torch.where(greedy, 1.0, temperatures), rows), rows)
        logprobs = torch.log_softmax(logits, -1)
        for index, row in enumerate(rows):
            if (top_p := row.trace.sampling.top_p) < 1.0:
                logprobs[index] = torch.from_numpy(nucleus(logprobs[index].numpy(), top_p))
        tokens = torch.multinomial(logprobs.exp(), 1, generator=self._generator)[:, 0]
        if bool(greedy.any()):
            tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
        for index, row in enumerate(rows):
            if row.generator is not None and not greedy[index]:
                tokens[index] = torch.multinomial(logprobs[index].exp(), 1, generator=row.generator)[0]
        sampled = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        done = {
            start + index
            for index, (row, token, logprob) in enumerate(zip(rows, tokens.tolist(), sampled, strict=True))
            if row.add(token, logprob, version)
        }
        finished = [self.rows[index] for index in sorted(done)]
        self._remove(done)
        return finished

    def _remove(self, gone: set[int]) -> None:
        if not gone:
            return
        num_left = len(self.rows) - len(gone)
        targets = [index for index in sorted(gone) if index < num_left]
        sources = [index for index in range(num_left, len(self.rows)) if index not in gone]
        if targets:
            self._slots.move(sources, targets)
            for source, target in zip(sources, targets, strict=True):
                self.rows[target] = self.rows[source]
        del self.rows[num_left:]


CACHED = frozenset(("full_attention", "sliding_attention"))  # kinds of layers whose memory is keys and values


def remembers_otherwise(model: Any) -> bool:
    """True if a layer of the model has another memory than keys and values."""
    return not CACHED.issuperset(getattr(model.config.get_text_config(), "layer_types", None) or ())


class UncachedBatch(RunningBatch):
    """Samples from models with layers that have no keys and values (linear attention, state spaces): every step recomputes all
    sequences.
    """

    def admit(self, rows: Sequence[RunningSequence], version: int) -> list[RunningSequence]:
        """Start sequences and sample their first token. Returns the sequences that are finished already."""
        start = len(self.rows)
        self.rows += rows
        return self._sample(start, self._last(self.rows[start:]), version)

    def step(self, version: int) -> list[RunningSequence]:
        """Sample one more token for every sequence. Returns the finished sequences."""
        return self._sample(0, self._last(self.rows), version)

    def rebuild(self, version: int) -> None:
        """Do nothing: the batch caches nothing of older weights."""

    def _last(self, rows: Sequence[RunningSequence]) -> Tensor:
        """Logits after the last token of each sequence, [B, V]."""
        logits = []
        for row in rows:
            sequence = (*row.prompt, *row.trace.tokens)
            inputs = self._inputs([(sequence, row.pictures)], torch.tensor([sequence]))
            logits.append(self._model(**inputs, use_cache=False, logits_to_keep=1).logits[0, -1])
        return torch.stack(logits)


def _shaped(logits_BV: Tensor, temperatures_B: Tensor, rows: Sequence[RunningSequence]) -> Tensor:
    """Logits over the temperature, of each row as its client wants them changed."""
    found_BV = logits_BV / temperatures_B[:, None]
    for index, row in enumerate(rows):
        sampling = row.trace.sampling
        if sampling.shaping is not None:
            shaped_V = shaped_logits(logits_BV[index].cpu().numpy(), sampling, row.prompt, row.trace.tokens)
            found_BV[index] = torch.from_numpy(shaped_V).to(found_BV)
    return found_BV


def _masked(logits_BV: Tensor, rows: Sequence[RunningSequence]) -> Tensor:
    """Rows of an answer with a schema without the tokens that it forbids here; the others as they are."""
    held = {index: row.matcher for index, row in enumerate(rows) if row.matcher is not None}
    if not held:
        return logits_BV
    allowed_HV = torch.from_numpy(np.stack([matcher.allowed() for matcher in held.values()]))
    logits_BV = logits_BV.clone()
    logits_BV[list(held)] = logits_BV[list(held)].masked_fill(~allowed_HV, float("-inf"))
    return logits_BV
