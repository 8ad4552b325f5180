"""A version of a model of 8B's shapes between two steps on one GPU: looked at there, and by way of the host.

The weights are random, in the shapes of Qwen3-8B, and the second version moves a share of them by one ulp. What the card
computes is checked against the host before it counts: the hashes of all tensors, and the objects of a delta, which are named
by their content. The store keeps manifests alone, so that no disk is measured. Seconds are wall seconds, the card's work waited
for.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from infra.policies.publish import NewVersion, publish
from infra.policies.share import HashedTensors, VersionTensors
from infra.policies.tensors import Rooms, from_torch_all
from infra.store.memory import MemoryStore
from infra.store.store import Pieces
from schemas.errors import ConfigError
from tests.memory import wait_for_card

if TYPE_CHECKING:
    import torch

HEAD = 128  # values of a head
KV_HEADS = 8


class CardPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured. vocabulary, hidden, inner, layers: of the model. share: of the values that a version moves. device:
    "cuda", or "cpu" to try it.
    """

    vocabulary: int = 151_936
    hidden: int = 4096
    inner: int = 12_288
    layers: int = 36
    share: float = 0.014
    device: str = "cuda"


class ManifestStore(MemoryStore):
    """Keeps manifests. keys: of all that was put."""

    def __init__(self) -> None:
        super().__init__()
        self.keys_put: set[str] = set()

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See Store."""
        self.keys_put.add(key)
        if "/manifests/" in key:
            super().put(key, data)

    def put_pieces(self, key: str, pieces: Pieces) -> None:
        self.keys_put.add(key)


def run(plan: CardPlan, say: Callable[[str], None]) -> dict[str, float]:
    """The figures, in seconds. Raises ConfigError where there is no GPU."""
    import torch

    from trainer.learners.card.tensors import CardTensors, moves

    if plan.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench card: got no NVIDIA GPU, expected one: it measures what a card computes")
    say("making up two versions")
    first = made_up(plan)
    second = {name: moved(value, plan.share) for name, value in first.items()}
    gb = sum(one.nbytes for one in first.values()) / 1e9
    stream = torch.cuda.Stream() if plan.device == "cuda" else None  # type: ignore[no-untyped-call]
    say(f"{gb:.1f} GB on the card")
    seconds: dict[str, float] = {}
    card_store, host_store = ManifestStore(), ManifestStore()
    before = CardTensors(stream)
    before.add(first)
    published(card_store, before, None, 0)
    after = CardTensors(stream)
    with timed(seconds, "copy", plan):
        after.add(second)
    with timed(seconds, "finite_and_hash", plan):
        assert after.entries and not after.not_finite
    with timed(seconds, "changed", plan):
        changed = sum(at.size for name, one in second.items() for _, _, at in moves(first[name], one))
    with timed(seconds, "publish", plan):
        published(card_store, after, before, 1)
    seconds["pass"] = seconds["finite_and_hash"] + seconds["changed"]
    say("the same by way of the host")
    host_before = HashedTensors(from_torch_all(first))
    published(host_store, host_before, None, 0)
    with timed(seconds, "host_copy", plan):
        host_after = HashedTensors(from_torch_all(second, Rooms()))
    with timed(seconds, "host_publish", plan):
        published(host_store, host_after, host_before, 1)
    assert after.entries == host_after.entries, "the hashes are not those of the host"
    assert card_store.keys_put == host_store.keys_put, "the objects are not those of the host"
    figures = {f"{name}_s": value for name, value in seconds.items()}
    return figures | {"gb": gb, "changed_share": changed / sum(one.numel() for one in first.values())}


@contextmanager
def timed(seconds: dict[str, float], name: str, plan: CardPlan) -> Iterator[None]:
    """Notes how long the block takes, until the card has done it."""
    wait_for_card(plan.device)
    begin_s = time.perf_counter()
    yield
    wait_for_card(plan.device)
    seconds[name] = time.perf_counter() - begin_s


def shapes(plan: CardPlan) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by Qwen3's names."""
    kv, wide, inner = KV_HEADS * HEAD, plan.hidden, plan.inner
    found: dict[str, tuple[int, ...]] = {name: (plan.vocabulary, wide) for name in ("embed_tokens", "lm_head")}
    layer = {
        "q_proj": (wide, wide),
        "k_proj": (kv, wide),
        "v_proj": (kv, wide),
        "o_proj": (wide, wide),
        "gate_proj": (inner, wide),
        "up_proj": (inner, wide),
        "down_proj": (wide, inner),
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
        "q_norm": (HEAD,),
        "k_norm": (HEAD,),
    }
    for number in range(plan.layers):
        found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return found | {"norm": (wide,)}


def made_up(plan: CardPlan) -> "dict[str, torch.Tensor]":
    """Normal weights in bfloat16."""
    import torch

    torch.manual_seed(0)

    def normal(shape: tuple[int, ...]) -> "torch.Tensor":
        return torch.empty(shape, dtype=torch.bfloat16, device=plan.device).normal_(0, 0.02)

    return {name: normal(shape) for name, shape in shapes(plan).items()}


def moved(tensor: "torch.Tensor", share: float) -> "torch.Tensor":
    """A share of the values one ulp away from zero."""
    import torch

    following = tensor.clone()
    patterns = following.view(-1).view(torch.int16)
    for part in torch.split(patterns, 2**25):
        part += torch.rand(len(part), device=part.device) < share
    return following


def published(
    store: ManifestStore, tensors: VersionTensors, previous: VersionTensors | None, version: int
) -> Mapping[str, float]:
    """A version in the store; what its event says of it."""
    new = NewVersion(policy="main", token=1, version=version, parent=version - 1, step=version)
    return publish(store, new, tensors, previous=previous, probe=None).stats
