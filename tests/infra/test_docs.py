"""README and infra/docs: what is written from the code is up to date, every snippet loads, parses or runs, every link resolves.

A fence says what it holds: `sh` (commands), `sh curl` and `python client` (run against a gateway), `toml` (settings), `python`
(run), `text`, `js` (looked at by readers alone). A word behind the language is the file it is written to.
"""

import ast
import asyncio
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headrace
from actors.gateway.config import GatewayLimits, Webhook
from infra.cli import docs
from infra.cli.commands.init import example_files
from infra.cli.settings import Settings, load_settings
from schemas import topics
from tests.actors.gateway.gateway_rig import engine, says, serving
from tests.bench import report
from tests.own_sources import name_of, sources, text_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", ".github/SECURITY.md")),
    *sorted((ROOT / "infra" / "docs").rglob("*.md")),
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
LANGUAGES = {"sh", "sh curl", "python", "python client", "python agent", "toml", "text", "js"}
# What a table of a snippet needs of the rest of the file.
BESIDE = {
    "gate": '[[master.evals]]\nsuite = "held-out"\n[[master.evals]]\nsuite = "production"\n',
    "environment": '[explore.options]\nenvironment = { use = "support:Stairs" }\n',
}
SHOWN_URL, SHOWN_KEY = "http://127.0.0.1:8000", "hr-…"


class FencedBlock(msgspec.Struct, frozen=True):
    """One fenced block. kind: its language, with `client`, `curl`, or `agent` (run by tests/actors/test_program.py)."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_fences(page: Path) -> Iterator[FencedBlock]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```([^\n]+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        language, _, rest = found[1].partition(" ")
        word = rest.partition(" ")[0]
        kind = f"{language} {word}" if word in ("client", "curl", "agent") else language
        yield FencedBlock(page.relative_to(ROOT).as_posix(), text.count("\n", 0, found.start()) + 1, kind, found[2])


WHOLE: Any = docs.command_tree()
FENCES = [fence for page in PAGES for fence in find_fences(page)]


def fences(kind: str) -> list[Any]:
    return [pytest.param(fence, id=str(fence)) for fence in FENCES if fence.kind == kind]


def test_the_reference_is_what_the_code_says() -> None:
    written = {page.relative_to(docs.FOLDER).as_posix() for page in (docs.FOLDER / "reference").iterdir()}
    pages = docs.pages()
    every = {docs.FOLDER / path: text for path, text in pages.items()} | report.pages()
    stale = [path for path, text in every.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "these pages differ from the code: run `make docs`"
    assert written - set(pages) == {f"reference/{name}.md" for name in ("http", "operations", "topics", "what-ships")}


def test_the_page_of_topics_has_every_topic_with_its_key_and_partitions() -> None:
    text = (docs.FOLDER / "reference" / "topics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", text, re.MULTILINE))
    assert set(rows) == {topic.name for topic in topics.ALL}
    for topic in topics.ALL:
        key, partitions = [cell.strip() for cell in rows[topic.name].split("|")][1:3]
        assert key.startswith(topic.key) and partitions == str(topic.partitions or "`kafka.partitions`"), topic.name


def test_every_setting_says_what_it_means() -> None:
    def silent(struct: type[msgspec.Struct], path: str) -> Iterator[str]:
        meanings = docs.described(struct)[1]
        for field in msgspec.structs.fields(struct):
            section = docs.nested_section(field.type)
            if section is not None:
                yield from silent(section[0], f"{path}.{field.encode_name}")
            elif not meanings.get(field.encode_name) and field.type is not Path:
                yield f"{path}.{field.encode_name}"

    assert not list(silent(Settings, ""))


def test_every_field_of_a_record_of_the_log_and_of_the_public_face_says_what_it_means() -> None:
    modules = [name_of(path).removesuffix(".py").replace("/", ".") for path in sources("schemas")]
    things = [thing for name in modules for thing in vars(importlib.import_module(name)).values()]
    things += [getattr(headrace, name) for name in headrace.__all__]
    records = {thing for thing in things if isinstance(thing, type) and issubclass(thing, msgspec.Struct)}
    records = {record for record in records - {msgspec.Struct} if not record.__name__.startswith("_")}
    assert {"Experience", "Batch", "Progress", "Completion", "LossInputs"} <= {record.__name__ for record in records}
    silent = {
        f"{record.__name__}.{field.encode_name}"
        for record in records
        for field in msgspec.structs.fields(record)
        if not docs.described(record)[1].get(field.encode_name) and docs.nested_section(field.type) is None
    }
    assert not silent


def test_every_option_of_a_part_that_ships_says_what_it_means() -> None:
    page = (docs.FOLDER / "reference" / "options.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")] == []


def test_every_part_that_ships_has_its_options_in_the_reference() -> None:
    """A score, an environment and the like in a file of their own are listed; helpers of those are not."""
    listed = re.findall(r"^### `([\w.]+):", (docs.FOLDER / "reference" / "options.md").read_text(), re.MULTILINE)
    for folder in ("streams/scores", "actors/rollout/environments"):
        for path in sorted((ROOT / folder).glob("*.py")):
            defines = re.search(
                rf"^(?:@score|def {path.stem}\(inputs|class \w+:\n.*\n.*def reset)", path.read_text(), re.MULTILINE
            )
            assert not defines or f"{folder.replace('/', '.')}.{path.stem}" in listed, path.name


def test_the_readme_fits_three_screens() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_page_has_a_title_and_then_a_sentence_about_it(page: Path) -> None:
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line]
    assert lines[0].startswith("# ") and lines[1][0] not in "#|-`"
    assert {item.kind for item in find_fences(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_and_picture_of_a_page_is_there(page: Path) -> None:
    for label, target in re.findall(r"\[([^\]]*)\]\(([^)\s]+)\)", without_fences(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, fragment = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.is_file(), f"{page.name}: [{label}] leads to {target}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", other.read_text(encoding="utf-8"), re.MULTILINE)
            assert fragment in {docs.anchor(heading) for heading in headings}, f"{page.name}: no heading {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [PAGES[0]]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for target in re.findall(r"\]\(([^)#\s]+\.md)[^)]*\)", page.read_text(encoding="utf-8")):
            waiting += [other for other in [(page.parent / target).resolve()] if other not in reached]
    assert reached == set(PAGES)


def test_every_picture_is_shown_on_some_page() -> None:
    shown = {
        (page.parent / item).resolve() for page in PAGES for item in re.findall(r"\]\(([^)]+\.png)\)", page.read_text())
    }
    assert shown == set(ROOT.glob("infra/**/*.png"))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_file_and_folder_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for named in re.findall(r"(?<![\w/.])(?:actors|infra|schemas|streams|tests|trainer)/[\w./*-]*\w", text):
        assert list(ROOT.glob(named)), f"{page.name}: {named}"


def without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("fence", fences("toml"))
def test_every_table_loads_as_settings(fence: FencedBlock, tmp_path: Path) -> None:
    text = fence.text if re.search(r"^app\b", fence.text, re.MULTILINE) else f'app = "docs"\n{fence.text}'
    text += BESIDE["gate"] if "[master.gate" in text and "[[master.evals]]" not in text else ""
    (tmp_path / "headrace.toml").write_text(text, encoding="utf-8")
    assert load_settings(tmp_path / "headrace.toml").app
    for module, name in re.findall(r'"((?:actors|streams|trainer)[\w.]+):(\w+)"', text):
        found = importlib.util.find_spec(module)
        assert found is not None and found.origin, f"{fence}: {module}"
        assert re.search(rf"^(?:class|(?:async )?def) {name}\b", Path(found.origin).read_text(), re.MULTILINE), (
            f"{fence}: {name}"
        )


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_python_snippet_runs_behind_those_before_it_with_headrace_alone(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "snippets"}
    for fence in find_fences(page):
        if fence.kind == "python":
            exec(compile(fence.text, str(fence), "exec"), names)
            imported = re.findall(r"^(?:from|import) (\w+)", fence.text, re.MULTILINE)
            assert {*imported} <= {"headrace", *sys.stdlib_module_names}, f"{fence}: {imported}"


@pytest.mark.parametrize("fence", [fence for fence in fences("text") if fence.values[0].text.startswith("import ")])
def test_what_a_program_for_readers_imports_comes_with_the_packages(fence: FencedBlock) -> None:
    for node in ast.walk(ast.parse(fence.text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert all(importlib.util.find_spec(name) for name in names), f"{fence}: {names}"


def test_the_tutorial_of_traffic_shows_lines_of_the_file_that_init_writes() -> None:
    text = (docs.FOLDER / "tutorials" / "learn-from-traffic.md").read_text(encoding="utf-8")
    written = {
        setting(line) for line in example_files("agent")["headrace.toml"].read_text(encoding="utf-8").splitlines()
    }
    shown = re.search(r"^```toml\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert shown and {setting(line) for line in shown[1].splitlines()} <= written


def setting(line: str) -> str:
    """A line of settings without the comment behind it."""
    return line.partition("  #")[0].strip()


def test_the_tutorial_shows_the_files_of_its_example() -> None:
    text = (docs.FOLDER / "tutorials" / "train-on-tasks.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^```(?:toml|python) (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert shown == {name: path.read_text() for name, path in example_files("sentence").items() if name != "README.md"}


@pytest.mark.parametrize("fence", fences("sh"))
def test_every_command_is_there_and_takes_its_options(fence: FencedBlock) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = fence.text.replace("\\\n", " ").splitlines()
    for words in filter(None, (shlex.split(line, comments=True) for line in lines)):
        if words[0] == "make":
            assert words[1] in targets, f"{fence}: make {words[1]}"
        else:
            if words[0] == "source":
                continue
            assert words[0] in ("headrace", "tensorboard", "hf"), f"{fence}: {words}"
            assert (Path(sys.executable).parent / words[0]).exists(), f"{fence}: {words[0]} comes with no package"
            if words[0] == "headrace":
                parse(words[1:], str(fence))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_in_a_sentence_is_there_too(page: Path) -> None:
    for quoted in re.findall(r"`headrace ([a-z][^`\n]*)`", without_fences(page)):
        command = WHOLE
        for word in re.sub(r"[|…].*", "", quoted).split():
            if hasattr(command, "commands"):
                assert word in command.commands or word.startswith("-"), f"{page.name}: headrace {quoted}"
                command = command.commands.get(word, command)
            elif word.startswith("--") and word != "--help":
                assert any(word in parameter.opts for parameter in command.params), f"{page.name}: headrace {quoted}"
    for module in re.findall(r"python -m ([\w.]+)", page.read_text(encoding="utf-8")):
        assert importlib.util.find_spec(module), f"{page.name}: {module}"


def parse(words: list[str], where: str) -> None:
    """Read a command line as typer does, and run nothing."""
    command = WHOLE
    while hasattr(command, "commands"):
        assert words and words[0] in command.commands, f"{where}: headrace {' '.join(words)}"
        command, words = command.commands[words[0]], words[1:]
    command.make_context(where, list(words))


@pytest.mark.slow
async def test_every_client_snippet_runs_against_a_gateway(tmp_path: Path) -> None:
    webhook = Webhook("/zendesk", b"the secret", "x-signature")
    limits = GatewayLimits(max_tokens=64, prompt_tokens=4096)
    async with serving(tmp_path, engine(says("Hello.")), webhooks=[webhook], limits=limits) as served:
        key = await served.new_key()
        answer = (await served.client(key).chat.completions.create(**ASK)).id
        for fence in (each_fence for each_fence in FENCES if each_fence.kind in ("python client", "sh curl")):
            text = fence.text.replace(SHOWN_URL, served.url).replace(SHOWN_KEY, key)
            program = ["bash", "-ec", text] if fence.kind == "sh curl" else [sys.executable, "-c", text]
            environment = {**os.environ, "HEADRACE_KEY": key, "ANSWER": answer, "NO_PROXY": "*", "no_proxy": "*"}
            done = await asyncio.to_thread(
                subprocess.run, program, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0 and '"error"' not in done.stdout, f"{fence}: {done.stdout}{done.stderr}"
        assert len(await served.received()) >= 5


ASK: dict[str, Any] = {"model": "main", "messages": [{"role": "user", "content": "Hello?"}]}


# Private or archaic words, with the plain term for each.
PLAIN = {
    "whoever": "the role or client", "is said": "name who reports it", "are said": "name who reports them",
    "say of": "report about", "words of": "reports or ratings of", "a word": "a rating or record",
    "told apart": "distinguished", "so long": "how long", "so many": "at most N", "anew": "again", "for ever": "permanently",
    "of no account": "does not matter", "goes on": "continues", "lies in": "is in", "mend": "fix", "let go": "release",
    "the one that": "repeat the noun", "those of": "repeat the noun", "as it is": "unchanged",
    "is taken": "name who accepts it", "beside": "next to, with, compared with",
}  # fmt: skip
NOT_PLAIN = re.compile(rf"\b(?i:{'|'.join(PLAIN)})\b|(?:^|[.:] )Of ")
# Uses left in each folder; lower a number when you fix its words.
WORDS_LEFT = {
    "infra/docs": 0, "infra/cli": 0, "infra": 1, "schemas": 0, "streams": 0, "actors": 0, "trainer": 0,
}  # fmt: skip


def written(path: Path) -> Iterator[str]:
    """Texts that people read: a page without code; docstrings, help of options and messages of errors of a module."""
    if path.suffix == ".md":
        yield without_fences(path)
        return
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not getattr(node, "name", "").startswith("_"):
                yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "help"):
            yield from (
                part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )


def test_pages_docstrings_help_and_errors_use_plain_words() -> None:
    generated = {docs.FOLDER / path for path in docs.pages()} | report.pages().keys()
    texts = [page for page in PAGES if page not in generated] + sources(
        "schemas", "infra", "streams", "actors", "trainer"
    )
    found: dict[str, list[str]] = {folder: [] for folder in WORDS_LEFT}
    for path in texts:
        name = name_of(path)
        home = max((folder for folder in WORDS_LEFT if name.startswith(f"{folder}/")), key=len, default="infra/docs")
        for text in written(path):
            plain = re.sub(r"\s+", " ", re.sub(r"`[^`]*`|\bbeside[:=]", "", text))
            found[home] += [
                f"{name}: {plain[max(0, at.start() - 40) : at.end() + 20]}" for at in NOT_PLAIN.finditer(plain)
            ]
    assert {folder: hits for folder, hits in found.items() if len(hits) > WORDS_LEFT[folder]} == {}
