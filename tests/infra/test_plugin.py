"""Plugins: what cannot be loaded is one line that says why."""

import sys
from pathlib import Path

import pytest

from infra.chain.processor import Memory, declared_mark
from infra.settings.plugin import add_plugin_folders, load, option_defaults
from schemas.errors import ConfigError

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
        ("plugin_that_needs:f", {}, 'x: plugin_that_needs:f needs the module "not_installed_anywhere"'),
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
