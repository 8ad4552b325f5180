"""The package that plugins import: a plugin of every kind, written with `headrace` alone; the version of headrace."""

import ast
import asyncio
import json
import os
import re
import site
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hatchling.builders.wheel import WheelBuilder
from typer.testing import CliRunner

import headrace
from actors.engines.engine import Engine
from actors.rollout.session import Session
from actors.rollout.tool import ParsedCall, ToolResult, answer, load_tool
from actors.rollout.workflow import Workflows
from headrace_wheel import PACKAGES, renamed
from infra.chain.chain import ChainResult, Context, Step, make_step, new_memories, run_chain
from infra.cli.connect import app_store
from infra.cli.examples import walkthrough
from infra.cli.main import app
from infra.cli.settings import load_settings
from infra.observe.release import commit, release
from infra.settings.plugin import load
from schemas import Experience, Message, Span, make_experience
from schemas.ids import experience_id
from tests.actors.turns import SAMPLING, TurnTokenizer, issued
from tests.infra import every_kind
from trainer.config import LaneConfig
from trainer.journal.origin import code_hash
from trainer.losses.loss import LossInputs, open_objective

HERE = "tests.infra.every_kind"


def test_headrace_exports_each_name_once_and_each_says_what_it_is() -> None:
    names = [name for kind in headrace.HOMES.values() for name in kind]
    assert sorted(names) == headrace.__all__ == sorted(set(names)) == dir(headrace)
    assert all(getattr(headrace, name) for name in headrace.__all__)
    types = ast.parse(Path(headrace.__file__).with_suffix(".pyi").read_text())
    shown = {
        (alias.name, node.module) for node in types.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    homes = {item for names in headrace.HOMES.values() for item in names.items()}
    assert shown == homes, "a type checker sees the same names"


def test_import_headrace_loads_no_heavy_library_and_a_stream_plugin_neither() -> None:
    script = (
        "import sys, headrace; print(*sys.modules); "
        "from headrace import Drop, Experience, Feedback, feedback, processor, score; print(*sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    heavy = {"torch", "vllm", "faust", "transformers", "aiokafka", "deepspeed", "jsonschema"}
    assert not heavy & set(said.split())


def test_every_kind_of_plugin_is_written_with_headrace_alone() -> None:
    tree = ast.parse(Path(every_kind.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"headrace", "collections.abc"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]


def test_the_walkthrough_is_a_page_that_makes_steps_with_headrace_alone(tmp_path: Path) -> None:
    page = Path(walkthrough.__file__).read_text()
    imported = {node.module for node in ast.walk(ast.parse(page)) if isinstance(node, ast.ImportFrom)}
    assert imported == {"headrace", "collections.abc", "pathlib"} and len(page.splitlines()) < 200
    means = asyncio.run(walkthrough.main(tmp_path, num_steps=2))
    assert len(means) == 2 and all(0 < mean < 1 for mean in means)


def said(text: str, episode: int = 0) -> Experience:
    return make_experience(
        id=experience_id("t.0", 0, episode), group="t.0", episode=episode, group_size=2,
        tokens=[1, 2, *map(ord, text)], logprobs=[-0.5] * len(text), spans=(Span(2, 2 + len(text), 1),),
        messages=[Message(role="user", content="?"), Message(role="assistant", content=text)],
    )  # fmt: skip


def passed(function: Any, *texts: str) -> ChainResult:
    step: Step = make_step("step", function)
    members = [said(text, episode) for episode, text in enumerate(texts)]
    return asyncio.run(run_chain([step], members, Context(memories=new_memories([step]))))


def test_processors_scores_and_feedback_of_a_plugin_run_in_the_chain() -> None:
    assert [one.reason for one in passed(every_kind.first_of_its_text, "a", "a").dropped] == ["said before"]
    assert [one.reason for one in passed(every_kind.longest_first, "a", "ab").dropped] == ["shorter"]
    assert [one.weight for one in every_kind.half((said("a"), said("b", 1)))] == [0.5, 0.5]
    (kept,) = passed(load(f"{HERE}:polite", {"word": "ab"}, "score"), "ab").kept
    assert [(one.name, one.value) for one in kept.scores] == [("step", 1.0)]
    read = every_kind.stars({"answer": "hr-t.0.0-0-0", "id": "1", "stars": "4"})
    assert read is not None and read.value == 0.8 and every_kind.stars({}) is None


def test_a_taskset_of_a_plugin_yields_tasks() -> None:
    taskset: Any = load(f"{HERE}:questions", {"limit": 3}, "--use")
    assert [task.id for task in taskset()] == ["q-0", "q-1", "q-2"]
    assert [row.response for row in every_kind.worked()] == ["0"]


def played(use: str, options: dict[str, Any]) -> Experience:
    """An episode on the plugin's own engine."""

    async def run() -> Experience:
        engine: Engine = load(f"{HERE}:Parrot", {"model": "", "limit": 90}, "engine")
        await engine.start()
        session = Session(engine, TurnTokenizer(), SAMPLING)
        scores = tuple(await Workflows(use, options).get("")(issued(), session))
        (one,) = session.experiences(group="t.0", attempt=0, episode=0, group_size=2, scores=scores)
        return one

    return asyncio.run(run())


def test_an_environment_and_an_engine_of_a_plugin_play_an_episode() -> None:
    environment = {"use": f"{HERE}:Door", "options": {"word": "yes"}}
    one = played("actors.rollout.workflows.interact:Interact", {"environment": environment})
    assert [(score.name, score.value) for score in one.scores] == [("environment", 1.0)] and one.end == "terminal"
    assert [message.content for message in one.messages] == ["go \n knock", "yes"]


def test_a_workflow_of_a_plugin_runs_an_episode() -> None:
    one = played(f"{HERE}:twice", {"again": "really?"})
    assert [message.content for message in one.messages] == ["go ", "yes", "really?", "yes"]
    assert [(score.name, score.value) for score in one.scores] == [("asked", 2.0)]


def test_a_tool_of_a_plugin_is_a_function_with_annotations() -> None:
    tool = load_tool(f"{HERE}:lookup", {})
    assert tool.parameters["required"] == ["order"] and "find an order" in tool.description
    call = ParsedCall(name="lookup", arguments={"order": 7, "detail": True})
    assert asyncio.run(answer(call, [tool], timeout_s=5.0)) == ToolResult("order 7 is on its way by ship")


def test_a_loss_of_a_plugin_is_a_lane_s_objective() -> None:
    objective = open_objective(LaneConfig(loss=f"{HERE}:plain", options={"scale": 2.0}))
    assert objective.mean == "tokens" and not objective.advantage
    tokens = {"logprob": torch.zeros(2), "behaviour": torch.tensor([0.5, 1.0]), "advantage": torch.ones(2)}
    inputs = LossInputs(**tokens, staleness=torch.zeros(2), ratio=torch.ones(2, dtype=torch.bool))
    assert objective.function(inputs).loss.tolist() == [1.0, 2.0]


def test_a_store_of_a_plugin_is_named_by_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(f'app = "a"\n[store]\nuse = "{HERE}:Shelf"\nkeys = "keys"\n')
    store = app_store(load_settings(file))
    store.put("policies/one", b"1")
    store.put("keys/one", b"2")
    assert store.get("policies/one") == b"1" and not (tmp_path / "store").exists()
    assert (tmp_path / "keys" / "keys" / "one").read_bytes() == b"2"
    with pytest.raises(headrace.ConfigError, match=r"store\.options\.size: unknown option"):
        app_store(load_settings(file, ["store.options.size=3"]))


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was unpacked in."""
    folder = tmp_path_factory.mktemp("wheel")
    (built,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        assert len(names) == len(set(names))
        archive.extractall(folder / "installed")
    return folder / "installed"


def run(installed: Path, cwd: Path, *arguments: str) -> str:
    """Output of Python with the installed package and libraries, and no checkout on its path."""
    found = os.pathsep.join((str(installed), *site.getsitepackages()))
    environment = {**os.environ, "PYTHONPATH": found, "COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-P", "-S", *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_names_of_modules_get_the_prefix_and_nothing_else_does() -> None:
    source = 'from infra.log import log  # of infra.log\nargv = ("-m", "infra.cli.main", "trainer.lanes", "infra")\n'
    assert renamed(source.encode(), ROOT).decode() == (
        "from headrace.infra.log import log  # of infra.log\n"
        'argv = ("-m", "headrace.infra.cli.main", "trainer.lanes", "infra")\n'
    )
    with pytest.raises(ValueError, match=r"got `import infra.log.log`, expected `from … import …`"):
        renamed(b"import infra.log.log\n", ROOT)


@pytest.mark.slow
def test_the_wheel_puts_one_name_into_site_packages(installed: Path) -> None:
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {"headrace"}


@pytest.mark.slow
def test_the_wheel_holds_documentation_examples_and_pictures_once(installed: Path) -> None:
    top = installed / "headrace"
    files = {path.relative_to(top).as_posix() for path in top.rglob("*") if path.is_file()}
    assert not [name for name in files if name.startswith(("infra/sdk", "docs", "tests", "README")) or ".pyc" in name]
    for kind in ("infra/docs/**/*.md", "infra/cli/examples/**/*.*", "infra/cli/**/*.png"):
        found = [path for path in ROOT.glob(kind) if path.suffix != ".pyc"]
        assert found and {path.relative_to(ROOT).as_posix() for path in found} <= files


@pytest.mark.slow
def test_the_installed_command_finds_its_documentation_and_its_examples(installed: Path, tmp_path: Path) -> None:
    shown = re.search(r"Documentation: (\S+)", run(installed, tmp_path, "-m", "headrace", "--help"))
    assert shown and Path(shown[1]) == installed / "headrace/infra/docs/README.md" and Path(shown[1]).is_file()
    run(installed, tmp_path, "-m", "headrace", "init", "mine", "--engine", "torch", "--tiny")
    run(installed, tmp_path, "-m", "headrace", "check", "-c", "mine/headrace.toml")


@pytest.mark.slow
def test_installed_every_module_is_imported_from_below_headrace_and_makes_the_same_bits(
    installed: Path, tmp_path: Path
) -> None:
    """Shipped modules have the names of the repository, and the code of a run has the same hash installed and not."""
    script = (
        "import importlib, json, pkgutil, sys, headrace\n"
        "assert all(getattr(headrace, name) for name in headrace.__all__)\n"
        "left_out = ('deepspeed', 'vllm', 'worker', 'child', '__main__', 'headrace.infra.cli.demo', 'sandbox',"
        " 'peers.ray_queue', 'peers.redis_stream')\n"  # they run in the environment of `make bench-deps`
        "for one in pkgutil.walk_packages(headrace.__path__, 'headrace.'):\n"
        "    if not any(word in one.name for word in left_out):\n"
        "        importlib.import_module(one.name)\n"
        "from headrace.infra.settings.plugin import find\n"
        "from headrace.trainer.journal.origin import code_hash\n"
        "learner = find('trainer.learners.torch:TorchLearner')\n"
        "code = code_hash((learner.__module__,))\n"
        "print(json.dumps([sorted({name.partition('.')[0] for name in sys.modules}), headrace.__file__, code]))\n"
    )
    loaded, file, code = json.loads(run(installed, tmp_path, "-c", script))
    assert file.startswith(str(installed)) and not set(loaded) & set(PACKAGES)
    assert code == code_hash(("trainer.learners.torch",))


def test_the_command_says_its_release_and_its_commit() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert re.fullmatch(rf"headrace {re.escape(release())}( \([0-9a-f]{{12}}(\+changes)?\))?", done.output.strip())


def test_package_chart_and_the_newest_section_of_the_changelog_are_of_one_release() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    chart = yaml.safe_load((ROOT / "infra" / "deploy" / "chart" / "Chart.yaml").read_text(encoding="utf-8"))
    newest = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert {declared, chart["version"], chart["appVersion"], newest} == {release()}


def test_a_checkout_has_a_commit_and_says_where_its_files_are_others(tmp_path: Path) -> None:
    assert commit(tmp_path) == ""
    checkout = tmp_path / "checkout"
    for words in (
        ("init", "-q", str(checkout)),
        ("-C", str(checkout), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"),
    ):
        subprocess.run(["git", *words], check=True)
    (checkout / "file").write_text("1")
    subprocess.run(["git", "-C", str(checkout), "add", "file"], check=True)
    assert re.fullmatch(r"[0-9a-f]{12}\+changes", commit(checkout))
