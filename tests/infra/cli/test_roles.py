"""Running a role in a process: its start, its rights, its ranks, what it is told, and how it stays down."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.config import GateConfig, MasterConfig, PeopleConfig, ReloadConfig
from actors.gateway.access.keys import create_key, list_keys
from infra.cli.connect import app_store
from infra.cli.options import SettingsFile, file_umask
from infra.cli.run.roles import implied_options, open_on_rank, train_on_ranks
from infra.cli.settings import Settings, load_settings
from infra.settings.config import Use
from infra.store.directory import DirectoryStore
from infra.store.seal import Keys, app_secret
from schemas.errors import ConfigError
from schemas.ids import keyed_subject
from streams.config import FeedbackConfig, From
from trainer.config import LoraConfig, TrainerConfig

SUBJECT = keyed_subject(b"secret", "acme", "ann")
ROOT = Path(__file__).resolve().parents[3]


def settings_file(folder: Path, more: str = "") -> Path:
    file = folder / "headrace.toml"
    file.write_text(f'app = "bot"\n{more}\n[gateway]\n')
    return file


def others_may(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.stat().st_mode & 0o077]


def test_what_a_command_makes_is_its_owners_alone(tmp_path: Path) -> None:
    file = settings_file(tmp_path)
    command = [sys.executable, "-m", "infra.cli.main", "keys", "create", "--tenant", "t", "-c", str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=120, umask=0o022)
    assert (tmp_path / "store" / "gateway" / "secret").exists() and not others_may(tmp_path / "store")


@pytest.mark.parametrize(("told", "mask"), [(None, 0o077), ("027", 0o027), ("0022", 0o022), ("rw", 0o077), ("", 0o077)])
def test_a_group_may_be_let_in_and_nonsense_lets_nobody_in(told: str | None, mask: int) -> None:
    assert file_umask({} if told is None else {"HEADRACE_UMASK": told}) == mask


def test_secrets_are_their_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    Keys(store).of(SUBJECT), create_key(store, tenant="t", scopes=("serve",), train="no", rpm=0, tpm=0)
    store.put("policies/main/1", b"weights")
    opened = {path.partition(str(tmp_path))[2].split("/")[1] for path in others_may(tmp_path)}
    assert opened <= {"policies", ".incoming"}
    assert {path.name for path in tmp_path.iterdir()} >= {"keys", "gateway"}


def test_what_seals_and_signs_lies_where_the_settings_say_and_nowhere_else(tmp_path: Path) -> None:
    settings = load_settings(settings_file(tmp_path, '[store]\nkeys = "secrets"\n'))
    store = app_store(settings)
    store.put("policies/main/1", b"weights")
    secret, key_id = app_secret(store), Keys(store).of(SUBJECT).key_id
    create_key(store, tenant="t", scopes=("serve",), train="no", rpm=0, tpm=0)
    assert len(list_keys(store)) == 1 and store.size("gateway/secret") == len(secret)
    data, secrets = DirectoryStore(tmp_path / "store"), DirectoryStore(tmp_path / "secrets")
    assert list(data.keys("")) == ["policies/main/1"]
    assert [name.split("/")[0] for name in secrets.keys("")] == ["gateway", "gateway", "keys"]
    assert sorted(store.keys("")) == sorted([*data.keys(""), *secrets.keys("")]) == list(store.keys(""))
    assert list(store.keys("policies/")) == ["policies/main/1"]
    assert Keys(store).destroy(SUBJECT) == (key_id,)
    store.delete("gateway/secret"), store.delete("policies/main/1")
    assert not list(data.keys("")) and "gateway/secret" not in list(secrets.keys(""))


def test_several_ranks_need_a_learner_of_many_processes(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('app = "t"\n[policy]\nmodel = "model"\n')
    settings = load_settings(file, ["trainer.ranks=2"])
    assert settings.trainer.ranks == 2
    with pytest.raises(ConfigError, match=r"got several with trainer\.learners\.torch:TorchLearner.*DeepSpeedLearner"):
        asyncio.run(train_on_ranks(settings, SettingsFile(file), asyncio.Event()))


class Deserted:
    """A learner whose other ranks are gone."""

    def __init__(self, model: str, config: TrainerConfig) -> None:
        raise RuntimeError("Connection closed by peer")


def test_another_rank_that_is_gone_is_no_mistake_in_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    learner = f'{{ use = "{__name__}:Deserted" }}'
    file.write_text(f'app = "t"\n[policy]\nmodel = "model"\n[trainer]\nlearner = {learner}\n')
    settings = load_settings(file, [])
    with pytest.raises(RuntimeError, match="closed by peer"):
        open_on_rank(settings, "model", {"WORLD_SIZE": "2", "RANK": "1"})
    with pytest.raises(ConfigError, match="closed by peer"):
        open_on_rank(settings, "model", {})


VLLM = Use(use="actors.engines.vllm.engine:VllmEngine")


def test_an_engine_that_must_know_of_adapters_when_it_starts_gets_what_the_trainer_adapts() -> None:
    lora = LoraConfig(rank=8, alpha=32, targets=("q_proj",))
    adapted = Settings(app="a", trainer=TrainerConfig(lora=lora))
    assert implied_options(adapted, VLLM) == {"lora": {"rank": 8, "alpha": 32, "targets": ("q_proj",)}}
    assert implied_options(Settings(app="a"), VLLM) == {}
    assert implied_options(adapted, Use(use="actors.engines.scripted:ScriptedEngine")) == {}


@pytest.mark.parametrize("name", ["vllm.engine:VllmEngine", "torch:TorchEngine", "scripted:ScriptedEngine"])
def test_every_engine_that_ships_can_be_set_to_keep_keys_and_values(name: str) -> None:
    settings = Settings(app="a", reload=ReloadConfig(kv="keep"))
    assert implied_options(settings, Use(use=f"actors.engines.{name}")) == {"kv": "keep"}


def test_an_engine_that_cannot_keep_keys_and_values_is_refused_where_it_is_to() -> None:
    other = Use(use="infra.observe.metrics:Metrics")
    assert implied_options(Settings(app="a"), other) == {}
    with pytest.raises(
        ConfigError, match=r'reload.kv: got "keep" with infra.observe.metrics:Metrics.*expected "rebuild"'
    ):
        implied_options(Settings(app="a", reload=ReloadConfig(kv="keep")), other)


def test_a_word_of_people_counts_as_long_as_a_session_and_any_feedback_are_waited_for_unless_said_otherwise() -> None:
    heard = From(webhook="/v1/feedback")
    feedback = tuple(
        FeedbackConfig(name=name, use="a:b", from_=heard, window=window) for name, window in (("a", "90m"), ("b", "1h"))
    )
    said = MasterConfig(gate=GateConfig(people=PeopleConfig(rating_window="2h")))
    minutes = 90 + 5  # of a session's silence
    assert Settings(app="a", feedback=feedback).gate().gate.people.rating_window == f"{minutes * 60_000}ms"
    assert Settings(app="a", feedback=feedback, master=said).gate().gate.people.rating_window == "2h"
    assert Settings(app="a").gate().gate.people.rating_window == "0s"


@pytest.mark.parametrize(
    "hint",
    [
        'RuntimeError("Engine core initialization failed. See root cause above.")',
        'EngineStopped("EngineCore encountered an issue. See stack trace (above) for the root cause.")',
    ],
)
def test_the_cause_that_vllms_process_logged_is_told_in_place_of_a_hint_at_it(tmp_path: Path, hint: str) -> None:
    log = tmp_path / "explore.log"
    log.write_text(
        "started role=explore\n(EngineCore pid=7) ERROR 11-28 05:29:31 [core.py:906] RuntimeError: no kernel for head_dim=8\n"
        "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
    )
    script = (
        "from actors.engines.engine import EngineStopped\nfrom infra.cli.exit_codes import root_cause\n"
        f"print(root_cause({hint}))"
    )
    with log.open("a") as stderr:
        done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert done.stdout == "RuntimeError: no kernel for head_dim=8\n"
