"""`headrace export-model VERSION FOLDER`: a published version as a model folder that transformers and vLLM load.

A version that is an adapter is merged into policy.model, in the dtype it was trained in; or written alone, as peft writes it.

Guarantees: every tensor is verified against the manifest that the version's event names before a byte of it is written;
the folder appears whole or not at all. Nothing of it is code.
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from infra.cli.connect import app_store, reading
from infra.cli.govern.channel import check_stored, servable
from infra.cli.govern.words import ChannelDecision, words_about
from infra.cli.options import SettingsFile, command
from infra.cli.settings import Settings
from infra.cli.terminal import Screen
from infra.ledger.archive import MODEL_SUFFIXES
from infra.log.log import Log
from infra.model.adapter import base_hash, merged_model, write_adapter_folder
from infra.model.model import DTYPE_NAMES, model_tensors
from infra.policies.beginning import folded
from infra.policies.fetch import PolicyFetcher
from infra.policies.policy import Adapter, Policy
from infra.policies.publish import SHARD_BYTES, split_runs
from infra.policies.tensors import Tensor, pieces_of
from infra.store.store import Store
from schemas import PolicyEvent
from schemas.errors import ConfigError

ABOUT = "headrace.json"
INDEX = "model.safetensors.index.json"
METADATA = {"format": "pt"}  # without it transformers takes no safetensors file


class ExportedPolicy(msgspec.Struct, frozen=True):
    """Description of an exported folder, its headrace.json. step: The last one that the version contains. adapter: None for
    whole weights.
    """

    app: str
    policy: str
    version: int
    parent: int
    step: int
    manifest_sha256: str
    decisions: tuple[ChannelDecision, ...] = ()
    adapter: Adapter | None = None


@command
async def export_model(
    chosen: SettingsFile,
    version: Annotated[str, typer.Argument(help='A published version, "newest" or "stable".')],
    folder: Annotated[Path, typer.Argument(help="Folder to write; it must not exist, or be empty.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapter, for a run with trainer.lora.")
    ] = False,
) -> int:
    """Write a version as a model folder: configuration, tokenizer, safetensors. transformers and vLLM load it.

    With trainer.lora the adapter is merged into policy.model; --adapter writes a peft folder instead. The command verifies
    every tensor first. headrace.json next to the weights names the version, with the decisions of the gate and of people.

    Example: [cyan]headrace export-model stable ./support-v144[/]
    """
    settings = chosen.load()
    check_new(folder)
    async with reading(settings) as log:
        event, decisions = await published(log, settings.policy.name, version)
    console = Screen(stderr=True)
    console.print(f"fetching version {event.version} of {event.policy}")
    num_bytes = await asyncio.to_thread(export, app_store(settings), event, settings, folder, decisions, alone=adapter)
    console.print(f"{folder}: version {event.version}, {num_bytes:,} bytes of weights; its origin: {ABOUT}")
    return 0


def check_new(folder: Path) -> None:
    """Raises ConfigError for a folder that holds anything, and for a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: the folder exists; expected a new or an empty folder")


async def published(log: Log, policy: str, version: str) -> tuple[PolicyEvent, list[ChannelDecision]]:
    """The event of a version (a number, "newest" or "stable"), and the decisions about it. Raises ConfigError."""
    if not version.isdigit() and version not in ("newest", "stable"):
        raise ConfigError(f'version: got "{version}", expected a number, "newest" or "stable"')
    known = (await folded(log)).of(policy)
    number = int(version) if version.isdigit() else known.newest if version == "newest" else known.stable.version
    words = await words_about(log, policy, number)
    event = servable(words.events).get(number)
    if event is None:
        there = f"the newest is {known.newest}" if known.events else "none is"
        raise ConfigError(f"version: got {version}, which is not published (or retracted); {there}")
    return event, [decision for decision in words.decisions if decision.version == number]


def export(
    store: Store,
    event: PolicyEvent,
    settings: Settings,
    folder: Path,
    decisions: Sequence[ChannelDecision] = (),
    *,
    alone: bool = False,
) -> int:
    """Fetch, verify and write; how many bytes of weights. alone: of an adapter nothing else. Blocks."""
    check_stored(store, event)
    policy = PolicyFetcher(store, event.policy).fetch(event)
    if alone and policy.adapter is None:
        raise ConfigError(
            f"--adapter: version {event.version} is full weights, expected one of a run with [trainer.lora]"
        )
    tensors = dict(policy.tensors) if alone else whole_tensors(policy, settings.model_path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        if alone and policy.adapter is not None:
            write_adapter_folder(made, policy.adapter, tensors)
            num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        else:
            num_bytes = write_model(tensors, settings.model_path, made)
        about = ExportedPolicy(
            app=settings.app, policy=event.policy, version=event.version, parent=event.parent, step=event.step,
            manifest_sha256=event.manifest_sha256, decisions=tuple(decisions), adapter=policy.adapter,
        )  # fmt: skip
        (made / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about)) + b"\n")
        made.rename(folder)
    return num_bytes


def whole_tensors(policy: Policy, model: str) -> dict[str, Tensor]:
    """All tensors of a version; an adapter's weights are added to the app's first model. Raises ConfigError."""
    if policy.adapter is None:
        return dict(policy.tensors)
    if (base := base_hash(model)) != policy.adapter.base:
        raise ConfigError(
            f"policy.model: version {policy.version} is an adapter of base {policy.adapter.base[:12]}, {model} is {base[:12]}; "
            "expected the model it was trained from, or --adapter to export it alone"
        )
    kinds = {tensor.dtype for tensor in policy.tensors.values()}
    return model_tensors(merged_model(model, policy.adapter, policy.tensors, dtype=DTYPE_NAMES[kinds.pop()]))


def write_model(tensors: dict[str, Tensor], model: str, folder: Path) -> int:
    """A model folder with these weights and the settings of another; how many bytes of weights."""
    copy_settings(model, folder)
    described = json.loads((folder / "config.json").read_bytes())
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.dtype in DTYPE_NAMES}
    if len(dtypes) == 1:
        described.pop("torch_dtype", None)  # how older folders call it
        described["dtype"] = DTYPE_NAMES[dtypes.pop()]
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    return write_shards(tensors, folder)


def copy_settings(model: str, folder: Path) -> None:
    """Configuration, tokenizer and template of the model the app began with. Raises ConfigError."""
    source = Path(model)
    if not source.is_dir():
        from infra.model.model import save_settings

        save_settings(model, folder)
        return
    for path in sorted(source.iterdir()):
        is_weights = path.suffix == ".safetensors" or path.name == INDEX
        if path.is_file() and path.suffix in MODEL_SUFFIXES and not is_weights:
            shutil.copyfile(path, folder / path.name)


def write_shards(tensors: Mapping[str, Tensor], folder: Path, shard_bytes: int = SHARD_BYTES) -> int:
    """Safetensors files of at most `shard_bytes` (or one tensor), with an index where there are several."""
    runs = list(split_runs({name: tensors[name].num_bytes for name in sorted(tensors)}, shard_bytes))
    names = [f"model-{n:05}-of-{len(runs):05}.safetensors" for n in range(1, len(runs) + 1)]
    if len(runs) == 1:
        names = ["model.safetensors"]
    for name, run in zip(names, runs, strict=True):
        with (folder / name).open("wb") as file:
            file.writelines(pieces_of({each_name: tensors[each_name] for each_name in run}, METADATA))
    num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
    if len(runs) > 1:
        where = {each_name: name for name, run in zip(names, runs, strict=True) for each_name in run}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": where}
        (folder / INDEX).write_bytes(json.dumps(index, indent=2).encode())
    return num_bytes
