"""Learner on several ranks: DeepSpeed ZeRO 0 to 3, optionally with the optimizer in host memory.

`headrace train --ranks N` or `torchrun` starts the ranks. The trainer calls rank 0; the others run `follow` until it closes.
Each rank gets its own rows, so any number of ranks gives the same gradient. Each rank saves and reads its own pieces of the
state, in the format of `TorchLearner`, for any number of ranks and any stage.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch.distributed as distributed

from infra.policies.policy import Probe
from infra.policies.tensors import Tensor
from infra.settings.config import duration_s
from infra.store.store import Store
from schemas.errors import StoreError
from trainer.batch.batch import PackedBatch
from trainer.config import TrainerConfig
from trainer.learners.channel import Channel
from trainer.learners.critic import check_critic
from trainer.learners.engines import Engines, RankCritic, begin_ranks, engine_settings
from trainer.learners.forward import PackedModel, compared, open_adapter
from trainer.learners.lanes import check_step, phase_objectives
from trainer.learners.learner import Phase, StepStats
from trainer.learners.numerics import numerics
from trainer.learners.orders import Order, Orders, without_rows
from trainer.learners.rank_step import RankStep
from trainer.learners.shards import Shards, Source
from trainer.learners.snapshot import Snapshot
from trainer.learners.step import log_distance, minibatches, miss
from trainer.losses.loss import open_objectives
from trainer.state import (
    Kind,
    Layout,
    Piece,
    StoredState,
    adapter_state,
    check_adapter,
    check_same,
    find_layout,
    open_state,
    whole_pieces,
)

logger = logging.getLogger(__name__)

PHASES: tuple[Phase, ...] = ("warmup", "train")
PHASE = "phase"
WRITE_S = 24 * 3600.0  # of one rank's upload against another's; a rank that hangs is found by its heartbeat


class DeepSpeedLearner:
    """Learner on several ranks, with DeepSpeed ZeRO.

    stage: ZeRO stage, 0 to 3. offload: Whether the optimizer state is in host memory.

    rank: rank 0 receives the calls; every other process calls `follow`.

    Up to stage 2 each rank loads the whole model, and a reference model, too. At stage 3 each rank reads
    them whole into the memory of its host once, and keeps its shard of both. `trainer.ranks_timeout` limits the wait of a rank
    for another.

    The sum of gradients over microbatches and ranks is in float32; but at stage 2 DeepSpeed rounds each microbatch's sum to
    trainer.dtype. Stage 1 with bfloat16 is refused.
    """

    def __init__(self, model: str, config: TrainerConfig, *, stage: int = 2, offload: bool = False) -> None:
        engine_settings(config, stage, offload)  # refused before anything is opened
        self._config = config
        self._stage = stage
        self._objectives = open_objectives(config.lanes)
        self.adapter = open_adapter(config, model)
        self._adapter_state = adapter_state(self.adapter)
        check_critic(config, self._objectives)
        timeout_s = duration_s(config.ranks_timeout)
        deepspeed, device = begin_ranks(config, timeout_s)
        self.rank: int = distributed.get_rank()
        self._world = distributed.get_world_size()
        self._channel, self._beside = Channel(timeout_s), Channel(WRITE_S)
        self._writing: threading.Thread | None = None
        self._store: Store | None = None
        settings = partial(engine_settings, stage=stage, offload=offload)
        opener = partial(PackedModel, model, device=device, looks_always=stage > 0)
        engines = Engines(
            deepspeed, self._channel, config, folder=model, settings=settings, open_packed=opener, device=device
        )
        with_reference = compared(self._objectives)
        policy = engines.policy(self.adapter, with_reference=with_reference)
        reference = engines.reference(policy) if with_reference else None
        self._model, self._engine = policy.packed, policy.run
        beside = [] if reference is None else reference.named
        self._shards = Shards(deepspeed, policy.run, policy.named, beside, stage=stage)
        self._critic: RankCritic | None = None
        if config.critic is not None:
            self._critic = engines.critic(config.critic)
        self._held = [self._shards, *([] if self._critic is None else [self._critic.shards])]
        self._ranks = RankStep(
            config,
            self._objectives,
            policy=policy,
            compare=None if reference is None else reference.run,
            critic=self._critic,
            shards=self._shards,
            channel=self._channel,
        )
        self._phase: Phase = "train"
        self._begin("train")
        self._orders = Orders(self._channel)

    def follow(self, store: Store) -> None:
        """Ranks other than 0: obey until rank 0 closes."""
        self._store = store
        while (order := self._orders.next()).name != "close":
            try:
                self._obey(order)
            except (StoreError, ValueError) as error:
                if order.name not in ("verify", "load"):  # rank 0 raises the errors of these two as well
                    raise
                logger.warning("%s: %s", order.name, error)
        self._end()

    def close(self) -> None:
        """Let the other ranks end. Rank 0 only; nothing can be called afterwards."""
        self._orders.close()
        with self._orders.lock:
            self._orders.give(Order(name="close"))
        self._end()

    def _end(self) -> None:
        if self._writing is not None:
            self._writing.join()
        distributed.destroy_process_group()  # its threads must not be running when the interpreter ends

    def begin_phase(self, phase: Phase) -> None:
        if phase not in PHASES:
            raise ValueError(f"phase: got {phase!r}, expected one of {', '.join(PHASES)}")
        self._call(Order(name="begin_phase", phase=phase))

    def step(
        self, batch: PackedBatch, *, learning_rate: float, seed: int, max_grad_norm: float = sys.float_info.max
    ) -> StepStats:
        check_step(self._objectives, batch, learning_rate)
        parts = minibatches(phase_objectives(self._objectives, self._phase), batch, seed)
        order = Order(
            name="step",
            counts=without_rows(batch),
            num_parts=len(parts),
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )
        stats: StepStats = self._call(order, parts)
        return stats

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._call(Order(name="tensors"))
        return found

    def probe(self, sequences: tuple[tuple[int, ...], ...]) -> Probe:
        return Probe(sequences, self._call(Order(name="probe", sequences=sequences)))

    def greedy_accuracy(self, batch: PackedBatch) -> float:
        if not batch.num_sequences:
            raise ValueError("batch: got no sequences, expected at least one")
        return float((self._call(Order(name="greedy", counts=without_rows(batch)), [batch]) == 0).mean())

    def log_distances(self, batch: PackedBatch) -> np.ndarray:
        return np.asarray(self._call(Order(name="distances", counts=without_rows(batch)), [batch]))

    def numerics(self) -> dict[str, str]:
        """The numerics of one process, the ranks, and the stage of ZeRO."""
        return numerics(self._model.device, adapted=self.adapter is not None) | {
            "attention": self._model.reading,
            "ranks": str(self._world),
            "zero": str(self._stage),
        }

    def save(self) -> dict[str, Tensor]:
        """Float32 weights, optimizer moments and phase, gathered whole: for comparisons; a checkpoint is a `snapshot`."""
        state: dict[str, Tensor] = self._call(Order(name="save"))
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `save`; rank 0 sends others one tensor at a time. Each rank reads its own pieces of a stored state."""
        check_adapter(state, self.adapter)
        layout = state.layout if isinstance(state, StoredState) else find_layout(state)
        check_same(layout, self._layout(layout))
        if isinstance(state, StoredState):
            names = tuple(state.layout)
            order = Order(name="load", folder=state.folder, index=state.key, sha256=state.sha256, names=names)
        else:
            names = tuple(sorted(state))
            order = Order(name="set", names=names, dtypes=tuple(state[name].dtype for name in names))
        self._call(order, state)

    def snapshot(self, store: Store, folder: str) -> Snapshot:
        """Copy the state to host memory, each rank its own pieces; the others write theirs from now on."""
        self._store = store
        found: Snapshot = self._call(Order(name="snapshot", folder=folder))
        return found

    def verify(self, state: StoredState) -> None:
        self._call(Order(name="verify", folder=state.folder, index=state.key, sha256=state.sha256), state)

    def _layout(self, of: Layout | None = None) -> dict[str, Kind]:
        """Layout of the state as it is, or as it would be with the moments of another."""
        found = {name: kind for shards in self._held for name, kind in shards.layout(of).items()}
        return found | {PHASE: Kind("U8", ())} | find_layout(self._adapter_state)

    def _call(self, order: Order, given: Any = None) -> Any:
        """Do an order on all ranks. given: its argument, which rank 0 alone has."""
        if self.rank:
            raise ValueError(f"rank {self.rank}: got a call of {order.name}, expected follow(): only rank 0 is called")
        with self._orders.lock:
            self._orders.give(order)
            return self._obey(order, given)

    def _obey(self, order: Order, given: Any = None) -> Any:
        match order.name:
            case "begin_phase":
                return self._begin(order.phase)
            case "step":
                return self._ranks.step(order, self._phase, given)
            case "tensors":
                return self._ranks.tensors()
            case "probe":
                return self._ranks.probe(order.sequences)
            case "greedy":
                return self._ranks.per_sequence(order, given, "hits", miss)
            case "distances":
                return self._ranks.per_sequence(order, given, "logprobs", log_distance)
            case "save":
                return self._save()
            case "set":
                return self._set(order, given)
            case "snapshot":
                return self._snapshot(order.folder)
            case "verify":
                return self._with_state(order, given, lambda state: state.verify(self.rank, self._world))
            case "load":
                self._with_state(order, given, lambda state: self._take(order.names, state))
                return self._use()
        raise ValueError(f"order: got {order.name!r}, which this rank does not know")

    def _begin(self, phase: Phase) -> None:
        if self._critic is not None and (self._phase, phase) == ("warmup", "train"):
            self._critic.begin_as(self._shards)
        self._phase = phase
        for shards in self._held:
            shards.forget()
        self._ranks.move_reference(0.0)

    def _pieces(self, *, copy: bool) -> list[Piece]:
        of_rank_0 = [Piece(PHASE, 0, bytes([PHASES.index(self._phase)])), *whole_pieces(self._adapter_state)]
        held = [piece for shards in self._held for piece in shards.pieces(copy=copy)]
        return [*held, *(of_rank_0 if not self.rank else ())]

    def _save(self) -> dict[str, Tensor]:
        mine = [msgspec.structs.astuple(piece) for piece in self._pieces(copy=False)]
        layout = self._layout()
        whole = {name: bytearray(kind.num_bytes) for name, kind in layout.items()}
        for data in self._channel.gather(msgspec.msgpack.encode(mine)):
            for name, start, part in msgspec.msgpack.decode(data, type=list[tuple[str, int, bytes]]):
                whole[name][start : start + len(part)] = part
        return {name: Tensor(kind.dtype, kind.shape, bytes(whole[name])) for name, kind in layout.items()}

    def _set(self, order: Order, given: Mapping[str, Tensor] | None) -> None:
        dtypes = dict(zip(order.names, order.dtypes, strict=True))

        def find_source(name: str) -> Source:
            whole = bytearray(self._channel.broadcast(None if given is None else bytes(given[name].data)))
            return Source(lambda start, stop: memoryview(whole)[start:stop], dtypes[name])

        if PHASE in dtypes:
            self._phase = PHASES[find_source(PHASE).read(0, 1)[0]]
        self._load(order.names, find_source)
        self._use()

    def _load(self, names: Sequence[str], find_source: Callable[[str], Source]) -> None:
        for shards in self._held:
            mine = shards.layout(names)
            shards.load([name for name in names if name in mine], find_source)

    def _use(self) -> None:
        for shards in self._held:
            shards.use()

    def _snapshot(self, folder: str) -> Snapshot:
        if self._writing is not None:
            self._writing.join()
        assert self._store is not None, "rank 0 has set it, the others follow with one"
        found = Snapshot(self._beside, self._store, folder, self._layout(), self._pieces(copy=True))
        if self.rank:
            self._writing = threading.Thread(target=found.write, name="snapshot")
            self._writing.start()
        return found

    def _take(self, names: Sequence[str], state: StoredState) -> None:
        self._phase = PHASES[state.read(PHASE, 0, 1)[0]]
        self._load(names, lambda name: Source(partial(state.read, name), state.layout[name].dtype))

    def _with_state(self, order: Order, given: StoredState | None, use: Callable[[StoredState], None]) -> None:
        """Use a stored state on every rank; on rank 0 StoreError or ValueError naming the ranks that could not."""
        said = ["", ""]
        try:
            if given is None:
                assert self._store is not None
                given = open_state(self._store, order.folder, order.index, order.sha256)
            use(given)
        except (StoreError, ValueError) as error:
            said = [type(error).__name__, f"rank {self.rank}: {error}"]
        found = [
            msgspec.msgpack.decode(data, type=list[str])
            for data in self._channel.everywhere(msgspec.msgpack.encode(said))
        ]
        if failed := [report for report in found if report[0]]:
            kind = StoreError if any(report[0] != ValueError.__name__ for report in failed) else ValueError
            raise kind("; ".join(text for _, text in failed))
