"""`headrace check`: the settings, the plugins, what runs in which order, the broker, the store and the newest checkpoint."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from infra.cli.check.connect import groups_of, object_fault, store_tried
from infra.cli.main import app
from infra.cli.settings import load_settings
from infra.local.address import HOST, choose_address
from infra.store.memory import MemoryStore
from schemas.errors import StoreError
from tests.infra.chat_models import STYLES, build_chat_model
from tests.own_sources import ROOT

PLUGIN = """
from headrace import Drop, Experience, Feedback, feedback, processor

@feedback(version=4)
def csat(ticket: dict, *, scale: float = 5.0) -> Feedback | None:
    return Feedback(ref=ticket["answer_id"], id=ticket["id"], value=ticket["csat"] / scale)

@processor(version=3)
def not_trivial(experience: Experience, *, min_tokens: int = 8) -> Experience | Drop:
    return experience if experience.num_sampled >= min_tokens else Drop("too short")
"""
SETTINGS = """
app = "bot"
plugins = ["plugins"]
[engine]
use = "actors.engines.scripted:ScriptedEngine"
[[feedback]]
name = "csat"
use = "{module}:csat"
from = {{ topic = "zendesk.closed" }}
window = "2h"
options = {{ scale = 10.0 }}
[[processor]]
use = "{module}:not_trivial"
options = {{ min_tokens = 3 }}
after = "validate"
[[score]]
name = "exact"
use = "streams.scores.exact:exact"
[reward]
blend = {{ csat = 1.0, judge = 0.3 }}
[verify.dedupe]
on = false
"""


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder with a plugin; the module's name is its own, since a process imports a name once."""
    module = "plugin_" + "".join(letter for letter in request.node.name if letter.isalnum())
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / f"{module}.py").write_text(PLUGIN)
    file = tmp_path / "headrace.toml"
    file.write_text(SETTINGS.format(module=module))
    return file


def check(config: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", "-c", str(config), *arguments], env={"COLUMNS": "160", "TERM": "dumb"})


def refused(config: Path, *arguments: str) -> str:
    result = check(config, *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    return line


def replaced(config: Path, old: str, new: str) -> Path:
    text = config.read_text()
    assert old in text
    config.write_text(text.replace(old, new))
    return config


def test_the_resolved_chain_is_shown_in_order_with_versions_and_options(config: Path) -> None:
    result = check(config)
    assert result.exit_code == 0, result.output
    shown = result.stdout[result.stdout.index("stage verify") :]
    order = [
        shown.index(name) for name in ("stage verify", "validate", "not_trivial", "filter", "exact", "stage collect")
    ]
    assert order == sorted(order)
    assert "dedupe" not in shown, "it is switched off"
    row = next(line for line in shown.splitlines() if "not_trivial" in line)
    assert "3" in row and "min_tokens=3" in row
    row = next(line for line in shown.splitlines() if "zendesk.closed" in line)
    assert all(word in row for word in ("csat", "4", "2h", "unlabelled", "amend"))
    assert "ScriptedEngine" in result.stdout and "dppo" in result.stdout


def test_what_was_not_tried_is_said_with_the_command_that_tries_it(config: Path) -> None:
    said = " ".join(check(config).stdout.split())
    assert (
        "not tried: whether topics are there, rights of broker and bucket; headrace check --connect tries them" in said
    )
    assert (
        "a role reads the settings when it starts: those that run keep the old ones until they are started again"
        in said
    )


def test_a_score_that_nothing_gives_is_pointed_out(config: Path) -> None:
    notes = [line for line in check(config).stdout.splitlines() if line.startswith("note:")]
    assert len(notes) == 2 and '"judge"' in notes[0] and "csat, exact" in notes[0]
    assert notes[1] == "note: policy.model: missing: explore, serve and train do not start without"


def test_where_the_file_names_no_score_the_note_names_none(config: Path) -> None:
    config.write_text(
        'app = "bot"\n[engine]\nuse = "actors.engines.scripted:ScriptedEngine"\n[reward]\nblend = {judge = 1}\n'
    )
    assert 'is called "judge"; expected a name that a workflow returns' in " ".join(check(config).stdout.split())


def test_a_plugin_folder_that_is_not_there(config: Path) -> None:
    assert 'plugins: got "plugins", expected a folder' in refused(moved(config))


def moved(config: Path) -> Path:
    (config.parent / "plugins").rename(config.parent / "elsewhere")
    return config


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("min_tokens = 3", "min_token = 3", ["processor[0].options.min_token", "unknown option", "min_tokens"]),
        ("min_tokens = 3", 'min_tokens = "3"', ["processor[0].options.min_tokens", "got '3'", "a whole number"]),
        ('after = "validate"', 'after = "validat"', ["processor[0].after", 'did you mean "validate"?']),
        (":not_trivial", ":not_trivia", ["processor[0]", "not_trivial"]),
        (":not_trivial", ":csat", ["processor[0].options.min_tokens", "unknown option", "scale"]),
        ("scale = 10.0", "scales = 10.0", ["feedback[0].options.scales", "scale"]),
        ("streams.scores.exact:exact", "streams.scores.nowhere:exact", ["score[0]", "streams.scores.nowhere"]),
        ("scripted:ScriptedEngine", "scripted:ScriptedMotor", ["engine.use", "did you mean"]),
        ("[[score]]", "[trainer.lanes.usual]\nloss = 'dppp'\n[[score]]", ["trainer.lanes.usual.loss", '"dppp"', "dppo"]),
        ("[[score]]", "[explore]\nworkflow = 'a.b:c'\n[[score]]", ["explore.workflow", "a.b:c"]),
        ('window = "2h"', 'window = "2 hours"', ["feedback[0].window", "2 hours", "a duration"]),
    ],
)  # fmt: skip
def test_a_plugin_that_cannot_be_used_is_one_line_that_names_its_table(
    config: Path, old: str, new: str, words: list[str]
) -> None:
    line = refused(replaced(config, old, new))
    assert all(word in line for word in words), line


def test_late_feedback_that_retrains_into_a_lane_of_pairs_is_refused(config: Path) -> None:
    lane = '\n[trainer.lanes.human]\nloss = "dpo"\n'
    replaced(config, 'window = "2h"', 'window = "2h"\nlate = "retrain"')
    assert check(config).exit_code == 0
    config.write_text(config.read_text() + lane)
    line = refused(config)
    assert all(word in line for word in ('feedback[0].late: got "retrain"', '"dpo" takes pairs', '"amend"')), line


def test_experts_that_one_side_wants_and_the_other_does_not_record_are_told(config: Path) -> None:
    wanted = ("--set", "trainer.routing=replay")
    recorded = ("--set", "engine.options.routing=true", "--set", "engine.use=actors.engines.torch:TorchEngine")
    notes = ["explorers of this file record no experts", "records experts that nothing reads"]
    for arguments, expected in (
        (wanted, [True, False]),
        (recorded, [False, True]),
        (wanted + recorded, [False, False]),
    ):
        told = check(config, *arguments)
        assert told.exit_code == 0, told.output
        assert [note in " ".join(told.output.split()) for note in notes] == expected


@pytest.mark.parametrize(
    ("style", "more", "shown"),
    [
        ("chatml", "", "tool calls as hermes, thoughts as think, by the chat template"),
        ("mistral", "", "tool calls as mistral, thoughts as think, by the chat template"),
        ("llama3", 'tool_parser = "none"', "tool calls as none, thoughts as think, by [policy]"),
    ],
)
def test_how_the_model_writes_calls_and_thoughts_is_shown(config: Path, style: str, more: str, shown: str) -> None:
    build_chat_model(config.parent / "model", STYLES[style])
    config.write_text(config.read_text() + f'[policy]\nmodel = "model"\n{more}\n')
    result = check(config)
    assert result.exit_code == 0 and shown in " ".join(result.output.split()), result.output


def test_an_option_that_vllm_does_not_have_is_refused_without_importing_vllm(config: Path) -> None:
    vllm = ("--set", "engine.use=actors.engines.vllm.engine:VllmEngine", "--set", "gateway={}")
    line = refused(config, *vllm, "--set", "engine.options.max_modl_len=4096")
    assert "engine.options.max_modl_len: not an option of this vLLM" in line and '"max_model_len"' in line
    assert "headrace needs" in refused(config, *vllm, "--set", "engine.options.scheduling_policy=fcfs")
    assert check(config, *vllm, "--set", "engine.options.max_model_len=4096").exit_code == 0
    line = refused(
        config, "--set", "engine.use=actors.engines.torch:TorchEngine", "--set", "engine.options.dtipe=float32"
    )
    assert "engine.options.dtipe: unknown option" in line and '"dtype"' in line


def test_a_secret_of_a_webhook_that_is_missing_is_refused_where_there_is_a_gateway(config: Path) -> None:
    hook = 'from = { webhook = "/zendesk", secret_env = "A_SECRET_THAT_NOBODY_SET" }'
    replaced(config, 'from = { topic = "zendesk.closed" }', hook)
    assert check(config).exit_code == 0
    assert "the environment has no A_SECRET_THAT_NOBODY_SET" in refused(config, "--set", "gateway={}")


def test_keys_of_langfuse_that_are_missing_are_refused(config: Path) -> None:
    source = 'from = { langfuse = { score = "csat", public_key_env = "NOBODY_SET_THIS" } }'
    replaced(config, 'from = { topic = "zendesk.closed" }', source)
    missing = 'feedback "csat": langfuse.public_key_env: the environment has no NOBODY_SET_THIS'
    assert missing in refused(config)


def test_a_model_that_is_not_there_or_has_no_tokenizer_is_refused(config: Path) -> None:
    named = ("--set", "policy.model=model")
    assert 'policy.model: got "model"' in refused(config, *named)
    build_chat_model(config.parent / "model", STYLES["chatml"])
    assert check(config, *named).exit_code == 0
    (config.parent / "model" / "tokenizer.json").unlink()
    assert "tokenizer" in refused(config, *named)


def test_a_model_in_the_working_directory_is_not_taken_for_one_beside_the_settings(config: Path) -> None:
    build_chat_model(config.parent / "elsewhere" / "model", STYLES["chatml"])
    command = [sys.executable, "-m", "infra.cli.main", "check", "-c", str(config), "--set", "policy.model=model"]
    done = subprocess.run(
        command, cwd=config.parent / "elsewhere", capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert "not beside the settings" in done.stderr and "elsewhere/model" in done.stderr


class Denying(MemoryStore):
    """A store whose rights lack some verbs."""

    def __init__(self, *denied: str) -> None:
        super().__init__()
        self.denied = denied

    def _check(self, verb: str) -> None:
        if verb in self.denied:
            raise StoreError(f"{verb}: AccessDenied")

    def put(self, key: str, data: bytes) -> None:
        self._check("put")
        super().put(key, data)

    def get(self, key: str) -> bytes:
        self._check("get")
        return super().get(key)

    def keys(self, prefix: str) -> Iterator[str]:
        self._check("list")
        return super().keys(prefix)

    def delete(self, key: str) -> None:
        self._check("delete")
        super().delete(key)


@pytest.mark.parametrize("denied", [(), ("get",), ("list",), ("delete",), ("list", "get"), ("put",), ("put", "get")])
def test_each_right_that_a_bucket_lacks_is_named(denied: tuple[str, ...]) -> None:
    store = Denying(*denied)
    said = object_fault(store, "checks/check-1")
    expected = denied[:1] if "put" in denied else denied  # what was not put cannot be asked for
    assert [verb for verb in ("put", "list", "get", "delete") if f"may not {verb}" in said] == sorted(
        expected, key=("put", "list", "get", "delete").index
    )
    store.denied = ()
    assert list(store.keys("")) == (["checks/check-1"] if "delete" in denied else [])


def test_a_store_that_gives_back_other_bytes_is_named() -> None:
    class Other(MemoryStore):
        def get(self, key: str) -> bytes:
            return b"something else"

    assert object_fault(Other(), "checks/check-1") == "may not get: other bytes came back"


def test_where_keys_lie_apart_both_places_are_tried(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('app = "t"\n[store]\nurl = "weights"\nkeys = "secrets"\n')
    tried = list(store_tried(load_settings(tmp_path / "headrace.toml")))
    assert [one.what for one in tried] == ["store weights", "keys secrets"] and not any(one.fault for one in tried)
    assert (tmp_path / "weights" / "checks").is_dir() and (tmp_path / "secrets" / "gateway").is_dir()


def test_a_store_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text('app = "t"\n[store]\nurl = "s3://bucket"\n')
    # The machine's role is not asked for.
    without = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_EC2_METADATA_DISABLED": "true"}
    done = CliRunner().invoke(
        app,
        ["check", "--connect", "-c", str(tmp_path / "headrace.toml")],
        env={"COLUMNS": "200", "TERM": "dumb", **without},
    )
    (row,) = [line for line in done.stdout.splitlines() if "│ store s3://bucket" in line]
    assert done.exit_code == 1 and "AWS_ACCESS_KEY_ID" in row


def test_a_broker_that_is_not_there_is_said_and_the_store_is_tried_all_the_same(tmp_path: Path) -> None:
    nowhere = f"{HOST}:{choose_address().port}"
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n[kafka]\nbootstrap_servers = "{nowhere}"\n')
    done = CliRunner().invoke(
        app, ["check", "--connect", "-c", str(tmp_path / "headrace.toml")], env={"COLUMNS": "160", "TERM": "dumb"}
    )
    assert done.exit_code == 1 and "no broker answers within 10 s" in done.stdout
    assert "put, list, get, delete" in done.stdout


def test_every_group_that_a_role_reads_as_is_tried(tmp_path: Path) -> None:
    topic = '[[feedback]]\nname = "csat"\nuse = "a:b"\nfrom = { topic = "zendesk.closed" }\n'
    file = '[[feedback]]\nname = "review"\nuse = "a:b"\nfrom = { file = "r.jsonl" }\n'
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n{topic}{file}')
    tried = groups_of(load_settings(tmp_path / "headrace.toml"))
    assert tried == ["tasks", "explore", "verify", "collect", "feedback", "feedback.csat"]
