"""`headrace export-model`: what was published is what another program loads."""

import asyncio
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from infra.cli.demo.char_model import Size, build_char_model
from infra.cli.govern.export_model import ABOUT, ExportedPolicy, check_new, export, published, write_shards
from infra.cli.settings import Settings
from infra.log.log import Log
from infra.log.memory import MemoryBus
from infra.model.model import load_model, load_tokenizer, model_tensors
from infra.model.vision import FAMILIES as SEEING
from infra.policies.publish import NewVersion, publish
from infra.policies.tensors import from_numpy
from infra.settings.config import PolicyConfig
from infra.store.memory import MemoryStore
from schemas import PolicyEvent, topics
from schemas.errors import ConfigError, PolicyRefused
from tests.contracts.test_learner import batch, opened
from tests.infra.tiny_families import build_family
from tests.tiny_models import build_eye_model
from trainer.config import LoraConfig

SMALL = Size(hidden=32, layers=1)


def published_events(*versions: int) -> list[PolicyEvent]:
    return [
        PolicyEvent(event="published", policy="main", version=version, manifest=f"m{version}", token=0)
        for version in versions
    ]


def found(version: str, *events: PolicyEvent) -> PolicyEvent:
    async def main() -> PolicyEvent:
        log = Log(MemoryBus(), "t")
        await log.create_topics(partitions=1, keep_ms=-1)
        for event in events:
            await log.publish(topics.POLICIES, event)
        return (await published(log, "main", version))[0]

    return asyncio.run(main())


def test_an_exported_version_loads_in_transformers_with_the_weights_that_were_published(tmp_path: Path) -> None:
    base = build_char_model(tmp_path / "base", 0, size=SMALL)
    trained = load_model(base)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.25)
    store = MemoryStore()
    tensors = model_tensors(trained)
    event = publish(
        store, NewVersion(policy="main", token=3, version=7, parent=-1, step=7), tensors, previous=None, probe=None
    )
    settings = Settings(app="t", policy=PolicyConfig(model="base"), folder=tmp_path)
    num_bytes = export(store, event, settings, tmp_path / "out" / "v7")
    again = load_model(tmp_path / "out" / "v7")
    assert all(torch.equal(item, other) for item, other in zip(again.parameters(), trained.parameters(), strict=True))
    assert load_tokenizer(tmp_path / "out" / "v7").encode("1+2") == load_tokenizer(base).encode("1+2")
    assert num_bytes == sum(tensor.num_bytes for tensor in tensors.values())
    assert msgspec.json.decode((tmp_path / "out" / "v7" / ABOUT).read_bytes(), type=ExportedPolicy).version == 7
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v7"], "nothing is left of the making"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "float32"),
        ("qwen3_moe", "float32"),
        ("qwen3_moe", "bfloat16"),
        *((each_family, "float32") for each_family in SEEING),
    ],
)
def test_plain_transformers_loads_an_exported_version_and_gives_the_probes_logprobs(
    tmp_path: Path, family: str, dtype: str
) -> None:
    base = tmp_path / "base"
    build_eye_model(base, family=family) if family in SEEING else build_family(base, family)
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 5], "temperature": 0.7, "do_sample": true}')
    learner = opened(str(base), dtype=dtype)
    learner.step(batch(0), learning_rate=1e-3, seed=0)
    probe = learner.probe(((1, *range(20, 40)), (1, 7, 9)))
    store = MemoryStore()
    new = NewVersion(policy="main", token=3, version=7, parent=-1, step=7)
    event = publish(store, new, learner.tensors(), previous=None, probe=probe)
    out = tmp_path / "v7"
    out.mkdir()  # an empty folder is taken
    export(store, event, Settings(app="t", policy=PolicyConfig(model="base"), folder=tmp_path), out)
    kind = AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM
    plain, loading = kind.from_pretrained(out, local_files_only=True, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and str(plain.dtype) == f"torch.{dtype}"
    for tokens, expected in zip(probe.sequences, probe.logprobs, strict=True):
        ids = torch.tensor([tokens])
        logprobs = torch.log_softmax(plain(input_ids=ids).logits[0, :-1].float(), -1).gather(1, ids[0, 1:, None])[:, 0]
        assert logprobs.tolist() == pytest.approx(expected, abs=1e-4 if dtype == "float32" else 0.25)
    assert AutoTokenizer.from_pretrained(out, local_files_only=True).chat_template
    assert GenerationConfig.from_pretrained(out, local_files_only=True).eos_token_id == [2, 5]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("qwen3_moe", "bfloat16")])
def test_an_adapter_is_merged_into_its_base_or_written_as_peft_writes_it(
    tmp_path: Path, family: str, dtype: str
) -> None:
    from peft import PeftModel

    build_family(tmp_path / "base", family)
    build_family(tmp_path / "other", family, seed=1)
    learner = opened(str(tmp_path / "base"), dtype=dtype, lora=LoraConfig(rank=4))
    learner.step(batch(0), learning_rate=1e-2, seed=0)
    probe = learner.probe(((1, *range(20, 40)), (1, 7, 9)))
    store = MemoryStore()
    new = NewVersion(policy="main", token=3, version=7, parent=-1, step=7, adapter=learner.adapter)
    event = publish(store, new, learner.tensors(), previous=None, probe=probe)
    settings = Settings(app="t", policy=PolicyConfig(model="base"), folder=tmp_path)
    export(store, event, settings, tmp_path / "whole")
    export(store, event, settings, tmp_path / "alone", alone=True)
    kind = AutoModelForCausalLM
    plain, loading = kind.from_pretrained(tmp_path / "whole", local_files_only=True, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"] and str(plain.dtype) == f"torch.{dtype}"
    adapted = PeftModel.from_pretrained(load_model(tmp_path / "base", dtype=dtype), str(tmp_path / "alone")).eval()
    for model in (plain, adapted):
        for tokens, expected in zip(probe.sequences, probe.logprobs, strict=True):
            ids = torch.tensor([tokens])
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].float(), -1)
            got = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
            assert got == pytest.approx(expected, abs=1e-4 if dtype == "float32" else 0.5)
    told = msgspec.json.decode((tmp_path / "alone" / ABOUT).read_bytes(), type=ExportedPolicy)
    assert told.adapter == learner.adapter and not (tmp_path / "alone" / "config.json").exists()
    elsewhere = Settings(app="t", policy=PolicyConfig(model="other"), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"policy.model: version 7 is an adapter of base .*expected the model it was"):
        export(store, event, elsewhere, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_a_folder_that_holds_anything_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigError, match=f"{taken}: the folder exists; expected .* an empty folder"):
            check_new(taken)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_what_cannot_be_exported_is_named_and_leaves_no_folder(tmp_path: Path) -> None:
    build_char_model(tmp_path / "base", 0, size=SMALL)
    store = MemoryStore()
    new = NewVersion(policy="main", token=3, version=7, parent=-1, step=7)
    event = publish(store, new, {"w": from_numpy(np.ones(4, np.float32))}, previous=None, probe=None)
    settings = Settings(app="t", policy=PolicyConfig(model="base"), folder=tmp_path)
    with pytest.raises(ConfigError, match="--adapter: version 7 is full weights"):
        export(store, event, settings, tmp_path / "v7", alone=True)
    (gone,) = published_events(3)
    with pytest.raises(ConfigError, match="version: 3 of main was published, but is not in the store any more"):
        export(store, gone, settings, tmp_path / "v7")
    (anchor,) = store.keys("policies/main/3/anchors/")
    store.put(anchor, store.get(anchor)[:-1] + b"x")
    with pytest.raises(PolicyRefused, match="with digest blake3"):
        export(store, event, settings, tmp_path / "v7")
    assert not (tmp_path / "v7").exists()


def test_several_files_have_an_index_that_names_every_tensor_once(tmp_path: Path) -> None:
    tensors = {f"w{n}": from_numpy(np.full(8, n, np.float32)) for n in range(5)}
    write_shards(tensors, tmp_path, shard_bytes=64)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == 160 and sorted(index["weight_map"]) == sorted(tensors)
    for name, file in index["weight_map"].items():
        assert load_file(tmp_path / file)[name][0] == int(name[1:])


def test_a_version_is_named_by_its_number_or_by_what_it_is_and_one_that_is_not_there_with_those_there_are() -> None:
    events = published_events(1, 2, 3)
    moved = PolicyEvent(event="promoted", policy="main", version=2, channel="stable")
    named = {name: found(name, *events, moved).version for name in ("1", "newest", "stable")}
    assert named == {"1": 1, "newest": 3, "stable": 2}
    with pytest.raises(ConfigError, match=r"got 2, which is not published .*; the newest is 3"):
        found("2", *events, PolicyEvent(event="orphaned", policy="main", version=2))
    with pytest.raises(ConfigError, match='expected a number, "newest" or "stable"'):
        found("latest", *events)
