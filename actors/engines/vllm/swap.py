"""Putting a version in place between two steps of vLLM, while its requests wait.

    stage ── pause ── salt ── apply ── caches ── label ── resume, and the probe enters ── probe's scores ── compare
    (between steps)   keep: new requests begin with another salt                                  (between steps)
                      rebuild: running requests are preempted, and what was cached is forgotten

Guarantee: no request has a salt before vLLM's last step under older weights. A pause is in vLLM's queue before whatever is
sent after it, and nothing is sent between its sending and the change of the salt.
"""

import asyncio
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from actors.engines.vllm.requests import Requests
from infra.policies.policy import Probe
from infra.policies.tensors import Tensor
from schemas.errors import PolicyRefused

Scores = list[tuple[float, ...]]
Loaded = tuple[float, str]  # of a worker, see `actors.engines.vllm.worker`
_LAYER = re.compile(r"^(.*?\.\d+)\.")
# Above this share of the bytes everything is sent: a partial load makes vLLM complain about each layer left out.
WHOLE_MODEL_SHARE = 0.5
PART_BYTES = 32 * 2**20  # loaded between two steps on a CPU, some tens of milliseconds; one layer or module at least


class Swap:
    """Swaps of one AsyncLLM. sees: whether its model takes pictures."""

    def __init__(self, llm: Any, requests: Requests, *, sees: bool) -> None:
        self._llm = llm
        self._requests = requests
        self._sees = sees
        self._is_overlapped = bool(llm.scheduler_config.async_scheduling)
        self._is_staged = False
        self._num_groups = 0

    async def begin(self) -> None:
        """Note what the workers hold; once, before the first `put`."""
        begun = await self._llm.collective_rpc("headrace_begin")
        self._is_staged = all(is_staged for is_staged, _ in begun)
        self._num_groups = max(num_groups for _, num_groups in begun)

    async def put(
        self, path: Path, parts: Sequence[list[str]], label: str, probe: Probe | None, *, keep: bool
    ) -> tuple[float, Scores]:
        """Put tensors of a safetensors file in place; (the longest time without a step in milliseconds, the probe's scores).

        parts: names of the tensors, see `parts_of`. label: of the attempt. keep: leave running requests their keys and values.
        Raises PolicyRefused where vLLM does not take them, or holds something else then.
        """
        core = self._llm.engine_core
        longest_ms = 0.0
        for index, names in enumerate([[], *parts] if self._is_staged and parts else ()):
            longest_ms = max(longest_ms, await self._ask(label, "headrace_stage", str(path), names, index == 0))
        if self._is_overlapped:
            await core.pause_scheduler_async(mode="keep", clear_cache=False)
        # A core whose steps do not overlap takes these one after the other between two steps: no need to wait for
        # each answer while this loop is busy with others.
        results = await asyncio.gather(
            core.pause_scheduler_async(mode="keep", clear_cache=False),
            self._change(label),
            self._llm.collective_rpc("headrace_apply", args=(str(path), [name for part in parts for name in part])),
            *([] if keep else self._forgetting()),
            self._llm.update_weight_version(label),
            return_exceptions=True,
        )
        if error := next((result for result in results if isinstance(result, BaseException)), None):
            self._refuse(label, error)
        began_s = min(self._loaded(label, cast(list[Loaded], results[2])))
        sequences = probe.sequences if probe else ()
        ended_s, *scores = await asyncio.gather(self._resumed(), *map(self._requests.submit_score, sequences))
        scored = [await score() for score in scores]
        compared_ms = [await self._ask(label, "headrace_compare", group) for group in range(self._num_groups)]
        return max(longest_ms, (ended_s - began_s) * 1e3, *compared_ms), scored

    async def _ask(self, label: str, method: str, *arguments: Any) -> float:
        """Have every worker do something between two steps; the most milliseconds that one took."""
        try:
            answers = await self._llm.collective_rpc(method, args=arguments)
        except Exception as error:
            self._refuse(label, error)
        return max(self._loaded(label, answers))

    def _refuse(self, label: str, error: BaseException) -> NoReturn:
        if self._llm.errored:
            raise error
        raise PolicyRefused(f"policy {label}: vLLM could not load it: {error}") from error

    def _loaded(self, label: str, answers: Sequence[Loaded]) -> list[float]:
        """The times of workers that loaded a version. Raises PolicyRefused where one did not."""
        if reason := next((reason for _, reason in answers if reason), ""):
            raise PolicyRefused(f"policy {label}: {reason}")
        return [at for at, _ in answers]

    async def _resumed(self) -> float:
        """Let vLLM go on; when it did."""
        await self._llm.resume_generation()
        return time.perf_counter()

    async def _change(self, label: str) -> None:
        self._requests.born = label

    def _forgetting(self) -> list[Any]:
        pictures = [self._llm.reset_encoder_cache()] if self._sees else []
        return [self._llm.reset_prefix_cache(reset_running_requests=True), *pictures]


def parts_of(changed: Iterable[str], tensors: Mapping[str, Tensor], part_bytes: int = PART_BYTES) -> list[list[str]]:
    """Names of the tensors to send, in the order of `tensors`, cut into parts of about so many bytes. tensors: that vLLM takes.

    vLLM rebuilds a module from all its sources, so each layer with a changed tensor goes whole, and lies in one part.
    """
    layers = {layer_of(name) for name in changed if name in tensors}
    by_layer: dict[str, list[str]] = {}
    for name in tensors:
        by_layer.setdefault(layer_of(name), []).append(name)
    sizes = {layer: sum(tensors[name].num_bytes for name in names) for layer, names in by_layer.items()}
    if sum(sizes[layer] for layer in layers) >= WHOLE_MODEL_SHARE * sum(sizes.values()):
        layers = set(by_layer)
    parts: list[list[str]] = []
    room = 0
    for layer, names in by_layer.items():
        if layer not in layers:
            continue
        if not parts or sizes[layer] > room:
            parts.append([])
            room = part_bytes
        parts[-1] += names
        room -= sizes[layer]
    return parts


def layer_of(name: str) -> str:
    """The layer of a tensor; of one outside the layers, its module.

    >>> layer_of("model.layers.3.self_attn.q_proj.weight")
    'model.layers.3'
    >>> layer_of("model.multi_modal_projector.linear_1.bias")
    'model.multi_modal_projector.linear_1'
    """
    found = _LAYER.match(name)
    return found[1] if found else name.rpartition(".")[0]
