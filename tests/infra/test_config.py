"""Settings: every mistake is one line with what, got, expected and where."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest

import infra.cli.settings  # noqa: F401 -- every table of the file
from infra.settings.config import Duration, Floor, Pacing, Section, Use, decode, duration_s
from infra.settings.toml import read_toml
from schemas.errors import ConfigError


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


def test_an_empty_table_takes_every_default() -> None:
    root = decoded({})
    assert root.kafka.bootstrap_servers == ""
    assert root.pacing == Pacing()
    assert root.keep.replay == "30d"


def test_int_is_a_float_and_a_list_is_a_tuple() -> None:
    root = decoded({"trainer": {"lanes": {"live": {"weight": 1}}}, "plugins": ["plugins"]})
    assert root.trainer.lanes["live"].weight == 1.0
    assert root.plugins == ("plugins",)


def test_a_union_takes_either_form() -> None:
    assert decoded({"trainer": {"publish_every": "5m"}}).trainer.publish_every == "5m"
    assert decoded({"trainer": {"publish_every": {"steps": 1}}}).trainer.publish_every == Steps(steps=1)


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


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"trainer": {"lanes": {"live": {"los": "dppo"}}}},
            'bot.toml: trainer.lanes.live.los: unknown key, did you mean "loss"?',
        ),
        ({"kafak": {}}, 'bot.toml: kafak: unknown key, did you mean "kafka"?'),
        ({"gateway": {"listen": "x"}}, "bot.toml: gateway: unknown key"),
        ({"folder": "x"}, "bot.toml: folder: unknown key"),
        (
            {"trainer": {"lanes": {"live": {"weight": "a"}}}},
            "bot.toml: trainer.lanes.live.weight: got 'a' (string), expected a number",
        ),
        (
            {"trainer": {"lanes": {"live": {"weight": -1}}}},
            "bot.toml: trainer.lanes.live: weight: got -1.0, expected 0 or more",
        ),
        (
            {"trainer": {"lanes": {"live": {"loss": "ppo"}}}},
            'bot.toml: trainer.lanes.live.loss: got \'ppo\' (string), expected one of "dppo", "sft"',
        ),
        (
            {"trainer": {"publish_every": {"step": 1}}},
            'bot.toml: trainer.publish_every.step: unknown key, did you mean "steps"?',
        ),
        ({"plugins": ["a", 1]}, "bot.toml: plugins[1]: got 1 (whole number), expected a string"),
        ({"kafka": 3}, "bot.toml: kafka: got 3 (whole number), expected a table"),
        (
            {"kafka": {"partitions": 0}},
            "bot.toml: kafka.partitions: got 0 (whole number), expected a whole number of 1 or more",
        ),
        ({"keep": {"replay": "30 days"}}, "bot.toml: keep.replay: got '30 days' (string), expected a duration such as"),
        ({"engine": {"options": {}}}, 'bot.toml: engine.use: missing, expected "module:name"'),
        ({"engine": {"use": "nocolon"}}, "bot.toml: engine.use: got 'nocolon' (string), expected \"module:name\""),
        (
            {"policy": {"template": {"tools": []}}},
            "bot.toml: policy: template.tools: got a value, expected names that headrace does not set by itself",
        ),
    ],
)
def test_a_mistake_names_file_path_got_and_expected(table: dict[str, object], message: str) -> None:
    assert mistake(table).startswith(message)


def test_a_missing_required_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^x\.toml: app: missing, expected a name"):
        decode({}, Root, "x.toml")


@pytest.mark.parametrize(
    ("text", "seconds"), [("30d", 2_592_000.0), ("2h", 7200.0), ("1.5m", 90.0), ("500ms", 0.5), ("2w", 1_209_600.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


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


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "none.toml")


def test_copies_of_topics_need_brokers_that_can_hold_them() -> None:
    assert "got replication = 3 without bootstrap_servers: the embedded broker is one alone" in mistake(
        {"kafka": {"replication": 3}}
    )
