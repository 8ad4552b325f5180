"""Which adapter a learner's state is of: one small tensor of it, so that the hash of the state covers it too."""

from collections.abc import Mapping

import msgspec

from infra.policies.adapter import Adapter, described
from infra.policies.tensors import Tensor

ADAPTER = "adapter"


def adapter_state(adapter: Adapter | None) -> dict[str, Tensor]:
    """The part of a state that names the adapter; empty where the whole model is trained."""
    if adapter is None:
        return {}
    data = msgspec.json.encode(adapter)
    return {ADAPTER: Tensor("U8", (len(data),), data)}


def adapter_of(state: Mapping[str, Tensor]) -> Adapter | None:
    """What a state is of. Raises ValueError for one that is not as `adapter_state` writes it."""
    if ADAPTER not in state:
        return None
    try:
        return msgspec.json.decode(state[ADAPTER].data, type=Adapter)
    except msgspec.DecodeError as error:
        raise ValueError(f"state: {ADAPTER}: {error}") from error


def check_adapter(state: Mapping[str, Tensor], adapter: Adapter | None) -> None:
    """Raise ValueError for a state of another adapter, of another base, or of full weights where an adapter is trained."""
    if (held := adapter_of(state)) != adapter:
        raise ValueError(f"state: it is {described(held)}, expected {described(adapter)}")
