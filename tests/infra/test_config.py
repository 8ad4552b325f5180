"""Settings from the TOML, secrets, places outside of the app, and plugins: what cannot be used is one line that says why."""

import asyncio
import gzip
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import pytest

from actors.gateway.config import CanaryShare
from actors.program.launch import ProgramInput, ask_service
from actors.rollout.environments.http import HttpEnvironment
from actors.rollout.environments.openenv import OpenEnv
from actors.rollout.tools.mcp import McpServer
from actors.rollout.workflow import EpisodeFailed
from infra.chain.processor import Memory, declared_mark
from infra.cli.run.roles import read_webhooks
from infra.cli.settings import load_settings, usual_dtype
from infra.settings.config import Duration, Floor, Section, Use, decode, duration_s, read_toml
from infra.settings.outside import checked_url
from infra.settings.plugin import add_plugin_folders, load, option_defaults
from infra.settings.secret import bearer, read_secret
from schemas import Message, Task
from schemas.errors import ConfigError
from streams.config import LangfuseConfig
from streams.scores.endpoint import UNREADABLE, Endpoint, EndpointConfig
from streams.sources import langfuse


class Lane(Section, frozen=True):
    loss: Literal["dppo", "sft"] = "dppo"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"weight: got {self.weight}, expected 0 or more")


class Steps(Section, frozen=True):
    steps: int


class Trainer(Section, frozen=True):
    lanes: dict[str, Lane] = {}
    publish_every: Duration | Steps = "2h"


class Root(Floor, frozen=True):
    engine: Use = Use(use="a:b")
    trainer: Trainer = Trainer()


def decoded(table: dict[str, object]) -> Root:
    return decode({"app": "bot", **table}, Root, "bot.toml")


def mistake(table: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        decoded(table)
    return str(caught.value)


def tables(kind: type[Section]) -> list[type[Section]]:
    return [one for child in kind.__subclasses__() for one in (child, *tables(child))]


@pytest.mark.parametrize(
    "table", [one for one in tables(Section) if not one.__module__.startswith("tests.")], ids=lambda one: one.__name__
)
def test_every_default_can_be_written_down_and_read_again(table: type[Section]) -> None:
    for field in msgspec.structs.fields(table):
        default = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        if default is not msgspec.NODEFAULT:
            written = msgspec.to_builtins(default, enc_hook=str)
            assert msgspec.convert(written, field.type, dec_hook=lambda kind, text: kind(text)) == default, field.name


def live(**lane: object) -> dict[str, object]:
    return {"trainer": {"lanes": {"live": lane}}}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (live(los="dppo"), 'trainer.lanes.live.los: unknown key, did you mean "loss"?'),
        ({"kafak": {}}, 'kafak: unknown key, did you mean "kafka"?'),
        ({"gateway": {"listen": "x"}}, "gateway: unknown key"),
        ({"folder": "x"}, "folder: unknown key"),
        (live(weight="a"), "trainer.lanes.live.weight: got 'a' (string), expected a number"),
        (live(weight=-1), "trainer.lanes.live: weight: got -1.0, expected 0 or more"),
        (live(loss="ppo"), 'trainer.lanes.live.loss: got \'ppo\' (string), expected one of "dppo", "sft"'),
        ({"trainer": {"publish_every": {"step": 1}}}, 'trainer.publish_every.step: unknown key, did you mean "steps"?'),
        ({"plugins": ["a", 1]}, "plugins[1]: got 1 (whole number), expected a string"),
        ({"kafka": 3}, "kafka: got 3 (whole number), expected a table"),
        ({"kafka": {"partitions": 0}}, "kafka.partitions: got 0 (whole number), expected a whole number of 1 or more"),
        ({"keep": {"replay": "30 days"}}, "keep.replay: got '30 days' (string), expected a duration such as"),
        ({"engine": {"options": {}}}, 'engine.use: missing, expected "module:name"'),
        ({"engine": {"use": "nocolon"}}, "engine.use: got 'nocolon' (string), expected \"module:name\""),
        (
            {"policy": {"template": {"tools": []}}},
            "policy: template.tools: got a value, expected names that headrace does not set by itself",
        ),
    ],
)
def test_a_mistake_names_file_path_got_and_expected(table: dict[str, object], message: str) -> None:
    assert mistake(table).startswith(f"bot.toml: {message}")


@pytest.mark.parametrize("text", ["", "30", "d", "-1s", "1 s", "1s2m"])
def test_a_bad_duration_says_what_a_duration_is(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a duration"):
        duration_s(text)


def written(folder: Path, text: str) -> Path:
    path = folder / "headrace.toml"
    path.write_text(text)
    return path


def test_sets_override_the_file_with_toml_values_or_bare_strings(tmp_path: Path) -> None:
    path = written(tmp_path, 'app = "a"\n[[score]]\nname = "x"\n')
    sets = ["app=b", "kafka.partitions=12", 'policy.model="m=1"', "score.0.name=y", "x.'a.b'=[1, 2]", "e=a b"]
    assert read_toml(path, sets) == {
        "app": "b",
        "kafka": {"partitions": 12},
        "policy": {"model": "m=1"},
        "score": [{"name": "y"}],
        "x": {"a.b": [1, 2]},
        "e": "a b",
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("app", "got no '='"),
        ("app.x=1", "app is a value, expected a table"),
        ("score.3.name=x", "expected an index below 1 of score"),
        ("a b=1", "expected names joined by dots"),
        ("=1", "expected names joined by dots"),
    ],
)
def test_a_bad_set_says_what_was_expected(tmp_path: Path, setting: str, message: str) -> None:
    path = written(tmp_path, 'app = "a"\n[[score]]\nname = "x"\n')
    with pytest.raises(ConfigError) as caught:
        read_toml(path, [setting])
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ['app = "a', "app = 1\napp = 2", "\x00"])
def test_a_file_that_is_not_toml_names_the_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(written(tmp_path, text))


def test_copies_of_topics_need_brokers_that_can_hold_them() -> None:
    said = mistake({"kafka": {"replication": 3}})
    assert "got replication = 3 without bootstrap_servers: the embedded broker is a single node" in said


def test_a_file_goes_before_the_variable_and_blanks_around_it_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("  from a file\n")
    environment = {"HEADRACE_X": "from a variable"}
    assert read_secret("a.b", "HEADRACE_X", "secret", tmp_path, environment) == "from a file"
    assert read_secret("a.b", "HEADRACE_X", "", tmp_path, environment) == "from a variable"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("", "a.b_env: the environment has no HEADRACE_X; set it, or name a file in b_file"),
        ("nowhere", "nowhere cannot be read: No such file or directory"),
        ("empty", "empty is empty"),
        ("bytes", "bytes holds no text"),
    ],
)
def test_a_secret_that_is_not_there_is_one_line_that_names_the_setting(file: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "bytes").write_bytes(b"s3cret\xff")
    with pytest.raises(ConfigError) as failed:
        read_secret("a.b", "HEADRACE_X", file, tmp_path, {})
    shown = str(failed.value)
    assert said in shown and shown.startswith("a.b_") and "s3cret" not in shown


def test_the_secret_of_a_webhook_lies_beside_the_settings(tmp_path: Path) -> None:
    (tmp_path / "hook").write_text("s3cret\n")
    source = 'name = "csat"\nuse = "streams.sources.received:rating"\nfrom = { webhook = "/z", secret_file = "hook" }\n'
    (tmp_path / "headrace.toml").write_text(f'app = "t"\n[[feedback]]\n{source}')
    (found,) = read_webhooks(load_settings(tmp_path / "headrace.toml"))
    assert found.secret == b"s3cret"
    (tmp_path / "hook").unlink()
    with pytest.raises(ConfigError, match=r"^feedback\[0\].from.secret_file: "):
        read_webhooks(load_settings(tmp_path / "headrace.toml"))


@pytest.mark.parametrize("made", [HttpEnvironment, McpServer, OpenEnv])
def test_a_token_may_lie_in_a_file(made: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token_file: got .*expected an absolute path"):
        made(url="http://x", token_file="token")
    with pytest.raises(ConfigError, match=r"token_file: .* cannot be read"):
        made(url="http://x", token_file=str(tmp_path / "token"))
    (tmp_path / "token").write_text("s3cret\n")
    made(url="http://x", token_file=str(tmp_path / "token"))
    assert bearer("", str(tmp_path / "token")) == {"Authorization": "Bearer s3cret"} and bearer("", "") == {}


METADATA = (
    "169.254.169.254", "169.254.169.254.", "2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0251.0376",
    "[fe80::1]", "[fe80::1%25eth0]", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "100.100.100.200",
    "metadata.google.internal", "Metadata",
)  # fmt: skip


@pytest.mark.parametrize("host", METADATA)
def test_a_clouds_metadata_service_is_refused_however_it_is_spelled(host: str) -> None:
    with pytest.raises(ValueError, match="link-local"):
        checked_url(f"http://{host}/latest/meta-data")


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "gopher://x/", "http://", "ftp://x", "x", "http://h:99999", "http://[::1"]
)
def test_what_is_no_web_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL such as"):
        checked_url(url)


def test_a_password_is_refused_and_not_told_and_every_address_is_checked() -> None:
    plugins = ("environments.http:HttpEnvironment", "environments.openenv:OpenEnv", "tools.mcp:McpServer")
    makers: list[Callable[[str], object]] = [
        checked_url,
        lambda url: CanaryShare(url=url),
        lambda url: EndpointConfig(url=url, model="m"),
        *(lambda url, use=use: load(f"actors.rollout.{use}", {"url": url}) for use in plugins),
    ]
    for make in makers:
        for url in ("http://ann:S3CRET@judge:8000/v1?S3CRET", "ftp://ann:S3CRET@judge/", "ann:S3CRET@judge"):
            with pytest.raises((ValueError, ConfigError)) as caught:
                make(url)
            assert "S3CRET" not in str(caught.value)
        with pytest.raises((ValueError, ConfigError), match="link-local"):
            make("http://169.254.169.254/v1")
    for url in ("http://127.0.0.1:8010", "https://judge.example:443/v1", "http://[::1]:8000/v1", "http://10.0.0.7/v1"):
        assert checked_url(url) == url


TASK = Task(id="t", messages=(Message(role="user", content="1+1?"),))


async def langfuse_refuses(url: str) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(langfuse.LangfuseAway) as caught:
            await langfuse._scores(client, LangfuseConfig(score="s", url=url), 0, 10)
    assert caught.value.reason == "page refused"


async def judge_refuses(url: str) -> None:
    endpoint = Endpoint(EndpointConfig(url=url, model="m"))
    assert (await endpoint.ask("", "", {}, lambda reply: True)).reason == UNREADABLE
    await endpoint.aclose()


async def program_refuses(url: str) -> None:
    with pytest.raises(EpisodeFailed, match=r"Content-Encoding|more than"):
        await ask_service(url, ProgramInput("http://x", "k", "m", {}), None)


async def environment_refuses(url: str) -> None:
    environment = HttpEnvironment(url=url)
    with pytest.raises(RuntimeError, match=r"Content-Encoding|more than"):
        await environment.reset(TASK, seed=0)
    await environment.close()


@pytest.mark.parametrize("refuses", [langfuse_refuses, judge_refuses, program_refuses, environment_refuses])
@pytest.mark.parametrize("kind", ["compressed", "endless"])
async def test_an_answer_of_a_service_takes_no_more_memory_than_its_limit(
    refuses: Callable[[str], Awaitable[None]], kind: str
) -> None:
    """A compressed answer, which nobody asked for, is refused before it is decoded; an endless answer at its limit."""
    requests: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append((await reader.readuntil(b"\r\n\r\n")).lower())
        head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"
        with closing(writer), suppress(ConnectionError):
            if kind == "compressed":
                writer.write(head + b"content-encoding: gzip\r\n\r\n" + gzip.compress(b" " * (1 << 22)))
                await writer.drain()
            else:
                writer.write(head + b"\r\n")
                while True:
                    writer.write(b" " * 65_536)
                    await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        await refuses(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert requests and all(b"accept-encoding: identity\r\n" in request for request in requests)


@pytest.mark.parametrize(
    ("flags", "card", "dtype"),
    [
        ("fpu avx512_bf16", False, "float32"),
        ("AuthenticAMD fpu avx512_bf16", False, "bfloat16"),
        ("amx_bf16", False, "bfloat16"),
        ("avx2", False, "float32"),
        ("avx2", True, "bfloat16"),
        (None, False, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_machine_multiplies_it_faster(
    flags: str | None, card: bool, dtype: str, tmp_path: Path
) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    if card:
        (tmp_path / "nvidiactl").touch()
    assert usual_dtype(tmp_path / "cpuinfo", tmp_path / "nvidiactl") == dtype


def test_auto_is_resolved_for_the_trainer_and_every_engine(tmp_path: Path) -> None:
    (tmp_path / "headrace.toml").write_text(
        'app = "bot"\n[engine]\nuse = "a:b"\noptions = { dtype = "auto", seed = 3 }\n[trainer]\ndtype = "auto"\n[gateway]\n'
        '[gateway.engine]\nuse = "a:b"\noptions = { dtype = "auto" }\n'
    )
    settings = load_settings(tmp_path / "headrace.toml")
    assert settings.gateway is not None and settings.gateway.engine is not None
    assert settings.engine.options == {"dtype": usual_dtype(), "seed": 3}
    assert settings.trainer.dtype == settings.gateway.engine.options["dtype"] == usual_dtype()


SOURCE = """
from typing import Literal
import msgspec
from infra.chain.processor import Memory, processor

LIMIT = 3

@processor(version=2)
def short(experience, *, min_tokens: int = 8, mode: Literal["a", "b"] = "a"):
    return experience

@processor(version=1)
def needy(experience, *, wanted: str):
    return experience

@processor(version=1, memory=4)
def remembers(experience, *, memory: Memory, size: int = 1):
    return experience

@processor(version=3)
class Judge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    base_url: str
    usd_per_day: float = 20.0

    def __call__(self, experience):
        return experience

class Plain:
    def __init__(self, *, size: int = 1):
        self.size = size
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("run")
    (folder / "plugins").mkdir()
    (folder / "plugins" / "plugin_under_test.py").write_text(SOURCE)
    (folder / "plugins" / "plugin_that_raises.py").write_text("1 / 0\n")
    (folder / "plugins" / "plugin_that_needs.py").write_text("import not_installed_anywhere\n")
    add_plugin_folders(folder, ["plugins"])
    add_plugin_folders(folder, ["plugins"])
    assert sys.path.count(str((folder / "plugins").resolve())) == 1
    return "plugin_under_test"


def test_a_function_comes_with_its_options_bound(module: str) -> None:
    function = load(f"{module}:short", {"min_tokens": 3})
    assert declared_mark(function).version == 2
    assert option_defaults(function) == {"min_tokens": 3, "mode": "a"}


def test_a_struct_is_made_from_its_options(module: str) -> None:
    judge = load(f"{module}:Judge", {"base_url": "https://x", "usd_per_day": 1})
    assert judge.usd_per_day == 1.0
    assert declared_mark(judge).version == 3
    assert option_defaults(judge) == {"base_url": "https://x", "usd_per_day": 1.0}


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("nocolon", {}, 'x: got "nocolon", expected "module:name"'),
        ("no_such_module:f", {}, 'x: no module "no_such_module" (no_such_module:f); is its folder in `plugins`'),
        ("plugin_that_needs:f", {}, 'x: no module "not_installed_anywhere" (plugin_that_needs:f); is its'),
        ("plugin_that_raises:f", {}, "x: importing plugin_that_raises:f raised ZeroDivisionError"),
        ("plugin_under_test:shrot", {}, 'x: module "plugin_under_test" has no "shrot", did you mean "short"?'),
        (
            "plugin_under_test:short",
            {"min_token": 3},
            'x.options.min_token: unknown option, did you mean "min_tokens"?',
        ),
        (
            "plugin_under_test:short",
            {"min_tokens": "3"},
            "x.options.min_tokens: got '3' (string), expected a whole number",
        ),
        ("plugin_under_test:short", {"mode": "c"}, 'x.options.mode: got \'c\' (string), expected one of "a", "b"'),
        ("plugin_under_test:needy", {}, "x.options.wanted: missing"),
        ("plugin_under_test:remembers", {"memory": 3}, "x.options.memory: unknown option; expected one of size"),
        ("plugin_under_test:Judge", {}, "x.options: base_url: missing, expected a string"),
        ("plugin_under_test:Judge", {"base_urls": "x"}, 'x.options: base_urls: unknown key, did you mean "base_url"?'),
        ("plugin_under_test:Plain", {"sise": 4}, 'x.options.sise: unknown option, did you mean "size"?'),
        ("plugin_under_test:LIMIT", {"a": 1}, "x: plugin_under_test:LIMIT takes no options"),
    ],
)
def test_a_mistake_is_one_line(module: str, use: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(use, options, "x")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("raised", ["SystemExit(0)", "GeneratorExit()", "BaseException()", "asyncio.CancelledError()"])
def test_a_plugin_that_ends_its_import_oddly_ends_no_process(tmp_path: Path, raised: str) -> None:
    name = f"plugin_that_leaves_{raised.partition('(')[0].replace('.', '_')}"
    (tmp_path / f"{name}.py").write_text(f"import asyncio\nraise {raised}\n")
    (tmp_path / f"{name}_late.py").write_text(
        f"import asyncio\nclass Late:\n    def __init__(self):\n        raise {raised}\n"
    )
    sys.path.append(str(tmp_path))
    try:
        for use in (f"{name}:f", f"{name}_late:Late"):
            with pytest.raises(ConfigError, match=raised.split("(")[0].split(".")[-1]):
                load(use, {}, "x")
    finally:
        sys.path.remove(str(tmp_path))


def test_memory_forgets_the_oldest_and_survives_its_bytes() -> None:
    memory = Memory(3)
    for key in "abcd":
        memory.set(key, ord(key))
    memory.set("b", 0)
    assert list(memory) == ["b", "c", "d"]
    again = Memory.from_bytes(memory.to_bytes(), 3)
    assert [(key, again.get(key)) for key in again] == [("b", 0), ("c", 99), ("d", 100)]
    assert again.to_bytes() == memory.to_bytes()
    assert list(Memory.from_bytes(memory.to_bytes(), 2)) == ["c", "d"]
