"""What an engine asks of a version that is an adapter, before it loads anything of it."""

from actors.engines.checks import check_tensors
from infra.model.adapter import adapter_shapes, base_hash, prepare
from infra.model.model import meta_model
from infra.policies.adapter import Adapter, described
from infra.policies.policy import Policy
from schemas.errors import PolicyRefused


class AdapterGate:
    """Whether versions fit what an engine serves. folder: its model, the base. One for the life of an engine."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._base = ""
        self._shapes: tuple[Adapter, dict[str, tuple[int, ...]]] | None = None

    def check(self, policy: Policy, serving: Adapter | None, *, whole: bool) -> None:
        """Raise PolicyRefused for an adapter of another base or with other tensors than it says, and for a change between
        adapters and whole models, of which an engine keeps no second copy. Blocks: the first time it reads the folder.

        serving: what the engine has on its base now. whole: it has loaded a whole model since it started.
        """
        who = f"policy {policy.version}"
        adapter = policy.adapter
        if (adapter is None and serving is not None) or (adapter is not None and whole):
            raise PolicyRefused(
                f"{who}: it is {described(adapter)}, the engine serves {described(serving)}; start the engine again to take it"
            )
        if adapter is None:
            return
        self._base = self._base or base_hash(self._folder)
        if adapter.base != self._base:
            raise PolicyRefused(
                f"{who}: its adapter belongs to base {adapter.base[:12]}, the engine's model {self._folder} is "
                f"{self._base[:12]}; expected the policy.model that the trainer has"
            )
        if self._shapes is None or self._shapes[0] != adapter:
            prepare()
            self._shapes = (adapter, adapter_shapes(meta_model(self._folder), adapter))
        check_tensors(policy, self._shapes[1])
