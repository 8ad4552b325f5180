"""Checks of an app that has started: log and store belong together, the newest checkpoint fits."""

from pathlib import Path

import msgspec

from infra.cli.connect import broker_address, kafka_folder, main_store, quieten_client
from infra.cli.plan.model import configured_adapter
from infra.cli.settings import Settings
from infra.local.broker import read_address
from infra.log.access import kafka_access
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.roles.identity import Fit, fault, fit_of
from infra.store.memory import MemoryStore
from infra.store.store import Store
from schemas.errors import BrokerUnavailable, ConfigError, StoreError

MAX_HEADER_BYTES = 100_000_000
BEGINS = {"reference": "the policy of that checkpoint", "critic": "policy.model"}


def check_state(settings: Settings) -> list[str]:
    """Changes that the next start would make to the newest checkpoint.

    Raises ConfigError for a checkpoint that cannot fit, for lanes that do not go with the critic, for [trainer.lora] on a model
    that cannot be adapted, and for a warm-up of a run that began without one.
    """
    from trainer.journal import checkpoint
    from trainer.learners.critic import check_critic
    from trainer.losses.loss import open_objectives

    objectives = open_objectives(settings.trainer.lanes)
    if settings.trainer.lora is not None and Path(settings.model_path, "config.json").is_file():
        configured_adapter(settings)
    check_critic(settings.trainer, objectives)
    if not is_there(settings):
        return []
    try:
        manifests = checkpoint.manifests(main_store(settings), settings.run or settings.app)
    except StoreError as error:
        return [f"the newest checkpoint was not looked at: {error}"]
    if manifests and settings.trainer.warmup is not None:
        checkpoint.check_warm_up(manifests[-1].position)
    if not manifests:
        return []
    newest, held = manifests[-1], set(manifests[-1].parts)
    what = f"checkpoint of step {newest.position.step}"
    check_shapes(settings, newest.shapes, what)
    wanted = {"reference"} if any(objective.reference for objective in objectives.values()) else set()
    wanted |= {"critic"} if settings.trainer.critic is not None else set()
    lacking = [f"{what} has no {part}, a lane wants one: it begins as {BEGINS[part]}" for part in sorted(wanted - held)]
    return lacking + [f"{what} has a {part} that no lane wants: it is left out" for part in sorted(held - wanted)]


def check_shapes(settings: Settings, shapes: dict[str, tuple[int, ...]], what: str) -> None:
    """Compare with the model's folder, where there is one. Raises ConfigError naming the first weight that differs."""
    folder = Path(settings.model_path)
    if not settings.policy.model or not folder.is_dir():
        return
    wanted, has = settings.trainer.lora, adapter_rank(shapes)
    if (wanted.rank if wanted is not None else 0) != has:
        raise ConfigError(
            f"trainer.lora: {what} is of {f'an adapter of rank {has}' if has else 'full weights'}, the settings ask for "
            f"{f'an adapter of rank {wanted.rank}' if wanted else 'full weights'}: a run keeps what it trains; expected the "
            "settings it was made with, or another name in `run`, which starts from policy.model"
        )
    here = {name: shape for path in sorted(folder.glob("*.safetensors")) for name, shape in header_shapes(path).items()}
    for name in sorted(shapes.keys() & here.keys()):
        if shapes[name] != here[name]:
            raise ConfigError(
                f"{what} does not fit the configured model: {name} is {shapes[name]}, policy.model has {here[name]}; "
                "expected the policy.model it was made with, or another name in `run`, which starts from policy.model"
            )


def adapter_rank(shapes: dict[str, tuple[int, ...]]) -> int:
    """Rank of the adapter with these weights, 0 for a whole model."""
    return next((shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight")), 0)


def header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a safetensors file, whose weights are not read. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(min(size, MAX_HEADER_BYTES)), type=dict[str, dict[str, object]])
        tensors = {name: entry["shape"] for name, entry in header.items() if "shape" in entry}
        return msgspec.convert(tensors, dict[str, tuple[int, ...]])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"policy.model: {path}: {error}") from error


ANSWER_S = 2.0
DEADLINE_S = 10.0


async def check_fit(settings: Settings) -> list[str]:
    """Compare them as a role does when it starts; nothing is started or made for it, and a broker that is away is reported.

    Raises ConfigError, with what helps, where they do not belong together, or where one refuses the credentials; StoreError.
    """
    has_store, has_log = is_there(settings), bool(settings.kafka.bootstrap_servers) or embedded_is_there(settings)
    if not has_store and not has_log:
        return []  # nothing has begun
    try:
        store = main_store(settings) if has_store else MemoryStore()
        fit = await found(settings, store) if has_log else await fit_of(Log(MemoryBus(), settings.app), store, settings)
    except BrokerUnavailable as error:
        return [f"log and store were not compared, as the roles do when they start: {error}"]
    why = fault(fit, settings.app, repr(store) if has_store else f"{settings.store.shown} (nothing is there)")
    if why:
        raise ConfigError(why)
    return []


async def found(settings: Settings, store: Store) -> Fit:
    """Compare the broker's log and the store. Raises BrokerUnavailable, ConfigError, StoreError."""
    from infra.log.kafka import KafkaBus, answers

    quieten_client()
    bootstrap, access = broker_address(settings), kafka_access(settings)
    if not await answers(bootstrap, timeout_s=ANSWER_S, access=access):
        raise BrokerUnavailable(f"no broker answers at {bootstrap}")
    bus = KafkaBus(bootstrap, deadline_s=DEADLINE_S, access=access)
    try:
        await bus.start()
        return await fit_of(Log(bus, settings.app), store, settings)
    finally:
        await bus.close()


def embedded_is_there(settings: Settings) -> bool:
    return read_address(kafka_folder(settings)) is not None


def is_there(settings: Settings) -> bool:
    """True if the store may hold data. It opens nothing: that would make the folder."""
    url = settings.store.url
    return bool(settings.store.use) or "://" in url or (settings.folder / Path(url).expanduser()).is_dir()
