"""`headrace check`: settings, plugins, chains, broker and store."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from infra.cli.check.connect import object_fault
from infra.cli.main import app
from infra.local.broker import HOST, choose_address
from infra.store.memory import MemoryStore
from schemas.errors import StoreError
from tests.infra.chat_models import STYLES, build_chat_model
from tests.infra.tiny_families import build_family

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
    assert all(word in result.stdout for word in ("ScriptedEngine", "dppo", "existing topics keep theirs"))


def test_a_source_that_polls_langfuse_is_shown(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGFUSE_PUBLIC_KEY", "LANGFUSE_SECRET_KEY"):
        monkeypatch.setenv(name, "k")
    result = check(replaced(config, '{ topic = "zendesk.closed" }', '{ langfuse = { score = "csat" } }'))
    assert result.exit_code == 0 and " langfuse " in result.stdout, result.output


def test_a_score_that_nothing_gives_is_pointed_out(config: Path) -> None:
    notes = [line for line in check(config).stdout.splitlines() if line.startswith("note:")]
    assert len(notes) == 2 and '"judge"' in notes[0] and "csat, exact" in notes[0]
    assert notes[1] == "note: policy.model: missing: explore, serve and train do not start without"


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
        ('plugins = ["plugins"]', 'plugins = ["elsewhere"]', ['plugins: got "elsewhere", expected a folder']),
        ('{ topic = "zendesk.closed" }', '{ langfuse = { score = "csat", public_key_env = "NOBODY_SET_THIS" } }',
         ['feedback "csat": langfuse.public_key_env: the environment has no NOBODY_SET_THIS']),
        ("[[score]]", "[gateway]\n[[score]]", []),
    ],
)  # fmt: skip
def test_a_plugin_or_a_secret_that_cannot_be_used_is_one_line_that_names_its_table(
    config: Path, old: str, new: str, words: list[str]
) -> None:
    if not words:  # a secret that only a gateway reads
        hook = 'from = { webhook = "/zendesk", secret_env = "NOBODY_SET_THIS" }'
        assert check(replaced(config, 'from = { topic = "zendesk.closed" }', hook)).exit_code == 0
        words = ["the environment has no NOBODY_SET_THIS"]
    line = refused(replaced(config, old, new))
    assert all(word in line for word in words), line


def test_late_feedback_that_retrains_into_a_lane_of_pairs_is_refused(config: Path) -> None:
    lane = '\n[trainer.lanes.human]\nloss = "dpo"\n'
    replaced(config, 'window = "2h"', 'window = "2h"\nlate = "retrain"')
    assert check(config).exit_code == 0
    config.write_text(config.read_text() + lane)
    line = refused(config)
    assert all(word in line for word in ('feedback[0].late: got "retrain"', '"dpo" takes pairs', '"amend"')), line


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


def test_a_model_that_is_not_there_or_has_no_tokenizer_is_refused(config: Path) -> None:
    named = ("--set", "policy.model=model")
    assert 'policy.model: got "model"' in refused(config, *named)
    build_chat_model(config.parent / "model", STYLES["chatml"])
    assert check(config, *named).exit_code == 0
    (config.parent / "model" / "tokenizer.json").unlink()
    assert "tokenizer" in refused(config, *named)


class Denying(MemoryStore):
    """A store whose rights lack some verbs."""

    denied: tuple[str, ...] = ()

    def _checked(self, verb: str) -> MemoryStore:
        if verb in self.denied:
            raise StoreError(f"{verb}: AccessDenied")
        return super()

    def put(self, key: str, data: bytes) -> None:
        self._checked("put").put(key, data)

    def get(self, key: str) -> bytes:
        return self._checked("get").get(key)

    def keys(self, prefix: str) -> Iterator[str]:
        return self._checked("list").keys(prefix)

    def delete(self, key: str) -> None:
        self._checked("delete").delete(key)


@pytest.mark.parametrize("denied", [(), ("get",), ("list",), ("delete",), ("list", "get"), ("put",), ("put", "get")])
def test_each_right_that_a_bucket_lacks_is_named(denied: tuple[str, ...]) -> None:
    store = Denying()
    store.denied = denied
    said = object_fault(store, "checks/check-1")
    named = {verb for verb in ("put", "list", "get", "delete") if f"may not {verb}" in said}
    assert named == set(denied[:1] if "put" in denied else denied), "what was not put cannot be asked for"
    store.denied = ()
    assert list(store.keys("")) == (["checks/check-1"] if "delete" in denied else [])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        # The machine's role is not asked for.
        ('[store]\nurl = "s3://bucket"\n', ["│ store s3://bucket", "AWS_ACCESS_KEY_ID"]),
        ('[kafka]\nbootstrap_servers = "HOST:PORT"\n',
         ["no broker answers within 10 s", "put, list, get, delete"]),
    ],
)  # fmt: skip
def test_a_store_or_a_broker_that_is_not_there_is_a_line_and_the_other_is_tried_all_the_same(
    tmp_path: Path, more: str, said: list[str]
) -> None:
    free = f"{HOST}:{choose_address().port}"
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n{more.replace("HOST:PORT", free)}')
    without = {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_EC2_METADATA_DISABLED": "true"}
    command = ["check", "--connect", "-c", str(tmp_path / "headrace.toml")]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERM": "dumb", **without})
    assert done.exit_code == 1 and all(words in done.stdout for words in said), done.stdout


SASL = 'security_protocol = "SASL_PLAINTEXT"\nsasl_username = "a"\nsasl_password_env = "NOBODY_SET_THIS"\n'


def test_a_password_of_the_broker_that_is_not_there_is_refused_and_nothing_is_asked_or_made(tmp_path: Path) -> None:
    config = tmp_path / "headrace.toml"
    config.write_text(f'app = "bot"\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\n{SASL}')
    assert "kafka.sasl_password_env: the environment has no NOBODY_SET_THIS" in refused(config)
    config.write_text('app = "bot"\n[kafka]\nbootstrap_servers = "127.0.0.1:1"\n')
    assert check(config).exit_code == 0 and [path.name for path in tmp_path.iterdir()] == ["headrace.toml"]


STATE_SETTINGS = """
app = "bot"
[engine]
use = "actors.engines.scripted:ScriptedEngine"
[policy]
model = "model"
[trainer.lanes]
usual = {{}}
{lanes}
"""


def check_state(folder: Path, lanes: str = "") -> tuple[int, str]:
    """Exit code and output, without its line breaks."""
    (folder / "headrace.toml").write_text(STATE_SETTINGS.format(lanes=lanes))
    result = CliRunner().invoke(app, ["check", "-c", str(folder / "headrace.toml")], env={"TERM": "dumb"})
    return result.exit_code, " ".join(result.output.split())


def test_a_critic_that_no_loss_uses_is_refused(tmp_path: Path) -> None:
    build_chat_model(tmp_path / "model", STYLES["chatml"])
    code, said = check_state(tmp_path, "[trainer.critic]")
    assert code == 2 and "trainer.critic: got a critic, expected a lane whose loss uses it" in said, said


def test_a_target_that_the_model_does_not_have_is_refused_before_anything_starts(tmp_path):
    build_family(tmp_path / "model", "qwen3_moe")
    code, said = check_state(tmp_path, '\n[trainer.lora]\ntargets = ["q_proj", "up_proj"]')
    assert code == 2 and 'trainer.lora.targets: got "up_proj", which names no module' in said, said
