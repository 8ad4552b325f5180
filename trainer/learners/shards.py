"""A rank's share of the state of a DeepSpeed engine at any ZeRO stage: weights, moments, a reference.

Stage 0 keeps everything on every rank in a plain optimizer; stages 1 and 2 shard the optimizer, stage 3 the weights too. A
rank reads and writes its own flat ranges in place; ranks gather tensors only to publish them, one tensor at a time.
`engine` and `deepspeed` come from the one module that may import the library.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

from trainer.state import READ_BYTES, Kind, Piece

MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
NAMED = {name: dtype for dtype, name in DTYPES.items()}


class Source(NamedTuple):
    """Reads the bytes of one tensor.

    read: bytes, from and to. dtype: a safetensors name.
    """

    read: Callable[[int, int], memoryview]
    dtype: str


class Fragment(NamedTuple):
    """A rank's part of one tensor of the state.

    name: of the tensor. start: of its values in the flat tensor. values: flat, the engine's own.
    """

    name: str
    start: int
    values: torch.Tensor


class Shards:
    """The state of one engine. named: its trained parameters. prefix: before the names of their weights; moments have none.
    reference: sharded at stage 3; whole on every rank below, and saved in equal shares.
    """

    def __init__(
        self,
        deepspeed: Any,
        engine: Any,
        named: Sequence[tuple[str, Any]],
        reference: Sequence[tuple[str, Any]],
        *,
        stage: int,
        prefix: str = "model/",
    ) -> None:
        self._deepspeed = deepspeed
        self._engine = engine
        self._prefix = prefix
        self._named = list(named)
        self._reference = list(reference)
        self.stage = stage
        self._rank, self._world = distributed.get_rank(), distributed.get_world_size()
        self._num_steps = 0
        self._create_moments()

    def count_step(self) -> None:
        self._num_steps += 1

    @torch.no_grad()
    def forget(self) -> None:
        """An optimizer as new."""
        for _, value in self._named:
            for key in MOMENTS:
                for fragment in self._held("", value, key):
                    fragment.values.zero_()
        self._set_num_steps(0)

    def layout(self, of: Collection[str] | None = None) -> dict[str, Kind]:
        """Names and kinds of a state. of: names of a saved state, whose moments they are; None: as now."""
        found: dict[str, Kind] = {}
        for name, value in self._named:
            found[f"{self._prefix}{name}"] = Kind("F32", _shape(value))
            has_moments = self._num_steps > 0 if of is None else f"adam/step/{name}" in of
            if has_moments:
                found |= {f"adam/{key}/{name}": Kind("F32", _shape(value)) for key in MOMENTS}
                found[f"adam/step/{name}"] = Kind("F32", ())
        return found | {
            f"reference/{name}": Kind(DTYPES[value.dtype], _shape(value)) for name, value in self._reference
        }

    def pieces(self, *, copy: bool = True) -> list[Piece]:
        """A copy of this rank's part of the state in host memory: together the parts of all ranks are the state. copy: False to
        share tensors that are in host memory already.
        """
        found = []
        for fragment in self._fragments(moments=self._num_steps > 0):
            values: Any = fragment.values.detach().to("cpu", copy=copy).view(torch.uint8).numpy()
            found.append(Piece(fragment.name, fragment.start * fragment.values.element_size(), memoryview(values)))
        if self._num_steps and not self._rank:
            step = torch.tensor(float(self._num_steps)).numpy().tobytes()
            found += [Piece(f"adam/step/{name}", 0, step) for name, _ in self._named]
        return found

    @torch.no_grad()
    def keep(self) -> Callable[[], None]:
        """Copy this rank's state; returns a function that puts it back, on all ranks together."""
        held = [*self._fragments(moments=True, whole=True)]
        copies, num_steps = [fragment.values.clone() for fragment in held], self._num_steps

        @torch.no_grad()
        def put_back() -> None:
            for fragment, copy in zip(held, copies, strict=True):
                fragment.values.copy_(copy)
            self._set_num_steps(num_steps)
            self.use()

        return put_back

    @torch.no_grad()
    def load(self, names: Sequence[str], find_source: Callable[[str], Source]) -> None:
        """Take over these tensors of a state, before `use`. find_source: one tensor; it is asked for in order."""
        held: dict[str, list[Fragment]] = {}
        for fragment in self._fragments(moments=True, whole=True):
            held.setdefault(fragment.name, []).append(fragment)
        if is_whole := any(f"{self._prefix}{name}" in names for name, _ in self._named):
            self.forget()  # the state of one process has no moments of a weight that never had a gradient
        step = 0.0
        steps = {f"adam/step/{name}" for name, _ in self._named}
        for name in names:
            source = find_source(name)
            if name in steps and not step:
                step = float(torch.frombuffer(source.read(0, 4), dtype=torch.float32))
            for fragment in held.get(name, ()):
                _fill(fragment, source)
        if is_whole:
            self._set_num_steps(int(step))

    def gathered(self, value: torch.nn.Parameter) -> AbstractContextManager[Any]:
        """A context in which a weight is whole."""
        found: AbstractContextManager[Any] = self._deepspeed.zero.GatheredParameters([value], enabled=self.stage == 3)
        return found

    @torch.no_grad()
    def move_reference(self, decay: float) -> None:
        """The reference as `decay` of itself and the rest the policy; at stage 3 each rank moves its own shards."""
        for (_, reference), (_, value) in zip(self._reference, self._named, strict=bool(self._reference)):
            there, here = (reference, value) if self.stage < 3 else (reference.ds_tensor.data, value.ds_tensor.data)
            there.lerp_(here.to(there.dtype), 1.0 - decay)
        self._let_go_of_reference()

    def _let_go_of_reference(self) -> None:
        """Small weights stay whole on every rank once a forward has gathered them: they are gathered again."""
        for _, value in self._reference if self.stage == 3 else ():
            value.partition()

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Over all ranks, after the last backward of a step and before `engine.step`; not finite where the gradient is not."""
        zero = self._engine.optimizer
        if not self.stage:
            norms = [value.grad.float().norm() for _, value in self._named if value.grad is not None]
            return float(torch.stack(norms).norm())
        if self.stage < 3:
            zero._wait_for_offload_copies()
            found = [float(zero.scaled_global_norm())]
        else:
            found = [float(norm) for norm in zero._get_norm_groups()]
        return math.hypot(*found) if min(found) >= 0 else math.nan  # -1 means one that is not finite

    def whole(self, name: str) -> torch.Tensor:
        """A trained weight in float32, on every rank. Collective."""
        value = dict(self._named)[name]
        found = value if not self.stage else self._deepspeed.utils.safe_get_full_fp32_param(value)
        whole: torch.Tensor = found.detach()
        return whole

    @torch.no_grad()
    def take(self, name: str, value: Any, whole: torch.Tensor) -> None:
        """Take over a weight, before `use`; one that is not trained has no float32 master besides itself."""
        fragments = self._held(name, value, None) if value.requires_grad else self._compared(name, value)
        for fragment in fragments:
            fragment.values.copy_(whole.reshape(-1)[fragment.start : fragment.start + len(fragment.values)])
        if self.stage == 3 and not value.requires_grad:
            value.partition()

    def forget_gradient(self) -> None:
        """After the last backward of a step: as if there had been none."""
        if not self.stage:
            self._engine.zero_grad()
            return
        self._spoil_gradient()
        self._engine.step()
        if self.stage == 3:  # a rank without a part of a small weight would keep NaN, which no step overwrites
            self._engine.optimizer.grad_partitions_flat_buffer.zero_()

    @torch.no_grad()
    def _spoil_gradient(self) -> None:
        """Make the gradient not finite, which `engine.step` then refuses and clears. Of stages 1 to 3."""
        zero = self._engine.optimizer
        norms = getattr(zero, "norm_for_param_grads", {})
        for key in norms:
            norms[key] = torch.tensor(math.nan)
        if norms and self.stage < 3:
            zero.update_offload_overflow_tracker(torch.tensor(math.nan))
        for gradients in zero.averaged_gradients.values():
            for gradient in gradients or ():
                gradient.fill_(math.nan)

    def _fragments(self, *, moments: bool, whole: bool = False) -> Iterator[Fragment]:
        """This rank's fragments. whole: also fragments that other ranks hold as well, and save."""
        for name, value in self._named:
            for fragment in self._held(f"{self._prefix}{name}", value, None):
                yield from self._shared(fragment, whole=whole or self.stage > 0)
            for key in MOMENTS if moments else ():
                for fragment in self._held(f"adam/{key}/{name}", value, key):
                    yield from self._shared(fragment, whole=whole or self.stage > 0)
        for name, value in self._reference:
            for fragment in self._compared(f"reference/{name}", value):
                yield from self._shared(fragment, whole=whole or self.stage == 3)

    def _shared(self, fragment: Fragment, *, whole: bool) -> Iterator[Fragment]:
        """The fragment, or this rank's share of it; nothing where that is empty."""
        first, last = (
            (0, len(fragment.values)) if whole else (len(fragment.values) * at // self._world for at in self._place)
        )
        if first < last:
            yield Fragment(fragment.name, fragment.start + first, fragment.values[first:last])

    @property
    def _place(self) -> tuple[int, int]:
        return self._rank, self._rank + 1

    def _held(self, name: str, value: Any, key: str | None) -> Iterator[Fragment]:
        """This rank's part of a weight (key None) or of a moment, in float32."""
        zero = self._engine.optimizer
        if not self.stage:
            whole = value.data if key is None else zero.state[value][key]
            yield Fragment(name, 0, whole.view(-1))
        elif self.stage < 3:
            if value._hp_mapping is not None:
                start = value._hp_mapping.lp_fragment_address.start
                yield Fragment(name, start, value._hp_mapping.get_hp_fragment(key))
        else:
            part, _ = zero._get_fp32_opt_state_partition(value, release_swap_buffers=True, optim_state_key=key)
            start = len(part) * self._rank
            if length := max(0, min(len(part), value.ds_numel - start)):  # the rest is padding
                yield Fragment(name, start, part[:length])

    def _compared(self, name: str, value: Any) -> Iterator[Fragment]:
        """This rank's part of a reference's weight."""
        if self.stage < 3:
            yield Fragment(name, 0, value.data.view(-1))
            return
        start = len(value.ds_tensor) * self._rank
        if length := max(0, min(len(value.ds_tensor), value.ds_numel - start)):
            yield Fragment(name, start, value.ds_tensor.data[:length])

    def use(self) -> None:
        """Compute with the float32 weights as they are now. Collective."""
        zero = self._engine.optimizer
        if self.stage == 3:
            self._let_go_of_reference()
            zero._partition_all_parameters()
            for group in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(group)
            self._gather_small()
        elif self.stage:
            zero.update_lp_params()

    def repartition(self) -> None:
        """Free the weights that a forward gathered, if no backward follows; else they would stay until the next step.
        Collective.
        """
        if self.stage == 3:
            self._engine.optimizer._partition_all_parameters()
            self._gather_small()

    def _gather_small(self) -> None:
        """Gather the parameters that stay whole on every rank."""
        if small := self._engine.optimizer.persistent_parameters:
            small[0].all_gather(small)

    def _create_moments(self) -> None:
        """An optimizer makes them at its first step, but a restore must find them."""
        zero = self._engine.optimizer
        if not self.stage:
            for _, value in self._named:
                moments = {key: torch.zeros_like(value) for key in MOMENTS}
                zero.state[value] = moments | {"step": torch.zeros(())}
            return
        flats = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        for flat in flats:
            moments = {key: torch.zeros_like(flat) for key in MOMENTS}
            zero.optimizer.state[flat] = moments | {"step": torch.zeros(())}
        if self.stage < 3:
            zero._lazy_init_hp_params_optimizer_state()

    def _set_num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        optimizer = self._engine.optimizer
        for state in (optimizer.optimizer if self.stage else optimizer).state.values():
            if "step" in state:
                state["step"] = torch.full_like(torch.as_tensor(state["step"]), num_steps)


def _fill(fragment: Fragment, source: Source) -> None:
    """Copy a fragment's bytes in place, a block at a time."""
    dtype = NAMED[source.dtype]
    block = READ_BYTES // dtype.itemsize
    for at in range(0, len(fragment.values), block):
        into = fragment.values[at : at + block]
        first = (fragment.start + at) * dtype.itemsize
        into.copy_(torch.frombuffer(source.read(first, first + len(into) * dtype.itemsize), dtype=dtype))


def _shape(value: Any) -> tuple[int, ...]:
    """A parameter's whole shape, also where ZeRO 3 holds only a part of it here."""
    return tuple(getattr(value, "ds_shape", value.shape))
