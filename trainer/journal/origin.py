"""The origin of a run's bits besides its journal: code, libraries, device, threads, settings.

Each checkpoint records it, so that a replay can say what differs here and what can still be promised. The code is what makes
the weights of a journaled batch and its blocks: reading blocks, packing items, preparing pictures, the losses, the learner.

The code's hash is read from sources; nothing is imported. `Sources` follows every name in a definition that its module defines
or imports, annotations and bases included, so that methods are reached with their class; of a reached module also what runs at
import. Guarantee: the hash changes with the text of what is reached and with what its names mean. Comments, docstrings, layout,
files that are not reached, and the place of a definition change nothing.
"""

import ast
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from infra.chain.chain import Step
from infra.settings.config import Floor
from infra.settings.plugin import BELOW, here, option_defaults
from trainer.config import TrainerConfig, loss_use
from trainer.learners.learner import Learner

FileOf = Callable[[str], Path | None]
IMPORT_TIME = ""  # the "definition" of a module that is all it does besides defining


class Definition(NamedTuple):
    """A definition in the sources.

    module: dotted name. name: in the module, IMPORT_TIME for all that the module does besides defining.
    """

    module: str
    name: str


class Module(NamedTuple):
    """The names of one module.

    definitions: name to the statements that bind it. imports: name to its source, whose own name is "" for a module.
    """

    definitions: dict[str, list[ast.stmt]]
    imports: dict[str, Definition]


class Sources:
    """The sources to be read. find_file: where a module lies, None for one that is not followed."""

    def __init__(self, find_file: FileOf) -> None:
        self._file_of = find_file
        self._modules: dict[str, Module | None] = {}
        self._texts: dict[Definition, str] = {}
        self._uses: dict[Definition, dict[str, Definition]] = {}

    def reached(self, roots: Iterable[Definition]) -> frozenset[Definition]:
        """Every definition that a root depends on. Raises ValueError for a root that is nowhere."""
        found: set[Definition] = set()
        todo = []
        for root in roots:
            home = self.home(root)
            if home is None:
                raise ValueError(f"{root.module}:{root.name}: no such definition in the sources")
            todo.append(home)
        while todo:
            place = todo.pop()
            if place not in found:
                found.add(place)
                todo += [Definition(place.module, IMPORT_TIME), *self.uses(place).values()]
        return frozenset(found)

    def digest(self, roots: Iterable[Definition]) -> str:
        """The hash of all that is reached, with what each name in it means."""
        lines = sorted(self._line(place) for place in self.reached(roots))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def home(self, place: Definition) -> Definition | None:
        """The place where a name is defined, through any number of imports; None for one that is not followed."""
        seen: set[Definition] = set()
        while place not in seen:
            seen.add(place)
            module = self._module(place.module)
            if module is None:
                return None
            if place.name in module.definitions or place.name == IMPORT_TIME:
                return place
            if place.name not in module.imports:
                return None
            place = module.imports[place.name]
        return None

    def uses(self, place: Definition) -> dict[str, Definition]:
        """Names in a definition to the definitions they mean."""
        if place in self._uses:
            return self._uses[place]
        module = self._module(place.module)
        assert module is not None
        found: dict[str, Definition] = {}
        self._uses[place] = found
        for statement in module.definitions.get(place.name, ()):
            for dotted in _names(statement):
                for target in self._targets(place.module, module, dotted):
                    found[dotted] = target
        return found

    def _targets(self, name: str, module: Module, dotted: str) -> Iterator[Definition]:
        """The definitions that `a` or `a.b` means."""
        first, _, second = dotted.partition(".")
        if first in module.definitions:
            yield Definition(name, first)
        elif first in module.imports:
            to = module.imports[first]
            if to.name == IMPORT_TIME:  # a module: what is taken from it
                to = Definition(to.module, second)
            if (home := self.home(to)) is not None:
                yield home

    def _line(self, place: Definition) -> str:
        """A definition, and what its names mean, in one line without the place where it lies."""
        names = [f"{name}={self._text(target)}" for name, target in sorted(self.uses(place).items())]
        return f"{self._text(place)} {' '.join(names)}"

    def _text(self, place: Definition) -> str:
        if place not in self._texts:
            module = self._module(place.module)
            assert module is not None
            text = "\n".join(ast.unparse(statement) for statement in module.definitions.get(place.name, ()))
            text = text.replace("from headrace.", "from ")  # installed, our modules lie below that name
            self._texts[place] = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self._texts[place]

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self._file_of(name)
            self._modules[name] = None if path is None else _read(path, name, self._file_of)
        return self._modules[name]


def _read(path: Path, name: str, find_file: FileOf) -> Module:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, Definition] = {}
    for statement in _without_docstrings(ast.parse(path.read_text(encoding="utf-8"))).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            imports |= dict(_imported(statement, package, find_file))
        else:
            bound = set(_bound(statement)) or {IMPORT_TIME}
            for each in bound:
                definitions.setdefault(each, []).append(statement)
    return Module(definitions, imports)


def _imported(
    statement: ast.Import | ast.ImportFrom, package: str, find_file: FileOf
) -> Iterator[tuple[str, Definition]]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], Definition(alias.name, IMPORT_TIME)
        return
    base = statement.module or ""
    if statement.level:
        parents = package.split(".")[: len(package.split(".")) - statement.level + 1]
        base = ".".join([*parents, *([base] if base else [])])
    for alias in statement.names:
        submodule = f"{base}.{alias.name}"
        place = Definition(submodule, IMPORT_TIME) if find_file(submodule) is not None else Definition(base, alias.name)
        yield alias.asname or alias.name, place


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names a top-level statement binds, also inside `if` and `try`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _names(statement: ast.stmt) -> set[str]:
    """Names read in a statement, with what is taken from each, as `a` and `a.b`; quoted annotations are names too."""
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree without them; comments and layout are not in it anyway."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("schemas", "infra", "trainer")
ROOTS = (
    Definition("schemas.wire.block", "decode_block"),
    Definition("trainer.batch.assemble", "train_items"),
    Definition("trainer.batch.image_inputs", "ImageInputs"),
    Definition("trainer.batch.assemble", "step_inputs"),
    Definition("trainer.health", "norm_limit"),
)
# Settings are compared on their own, and what is fetched is checked by its hash: how both are done changes no bit.
NOT_FOLLOWED = (
    "infra/log/", "infra/settings/config.py", "infra/observe/failpoint.py", "infra/settings/plugin.py",
    "infra/chain/processor.py", "infra/store/store.py", "infra/store/directory.py", "infra/store/memory.py",
    "infra/store/s3.py", "schemas/errors.py", "trainer/config.py",
)  # fmt: skip


def made_with(config: TrainerConfig, floor: Floor, learner: Learner) -> dict[str, str]:
    """By name, in words that can be compared."""
    code = code_hash(places(config, learner))
    return {"code": code, "settings": config_hash(config, floor), **learner.numerics()}


def config_hash(config: TrainerConfig, floor: Floor, chain: Sequence[Step] = ()) -> str:
    """Hash of the settings that shape a step, so that the journal shows where they changed."""
    steps = [[step.stamp, repr(option_defaults(step.function))] for step in chain]
    pacing = msgspec.to_builtins(floor.pacing)
    del pacing["groups_in_flight"]  # of what is issued, and no step depends on that
    shaping = {"trainer": msgspec.to_builtins(config), "pacing": pacing, "batch": steps}
    return hashlib.sha256(msgspec.json.encode(shaping, order="deterministic")).hexdigest()[:16]


def places(config: TrainerConfig, learner: Learner) -> tuple[Definition, ...]:
    """The definitions that a run's weights come from; those of plugins too."""
    losses = {loss_use(lane.loss) for lane in config.lanes.values()}
    named = [
        Definition(here(module), name.partition(".")[0])
        for module, _, name in (use.partition(":") for use in sorted(losses))
    ]
    made = type(learner)
    return (*ROOTS, Definition(made.__module__, made.__qualname__.partition(".")[0]), *named)


@functools.cache
def code_hash(roots: Sequence[Definition], root: Path = ROOT) -> str:
    """Hash of all definitions that the roots reach.

    root: folder of the sources. Of a root whose sources are not here, as of one in an installed library, its name counts.
    """
    sources = Sources(lambda module: find_file(module, root, folders))
    folders = tuple(found for place in roots if (found := _plugin_folder(place)) is not None)
    known = [place for place in roots if sources.home(place) is not None]
    named = sorted(f"{place.module}:{place.name}" for place in roots if place not in known)
    digest = hashlib.sha256(f"{sources.digest(known)} {' '.join(named)}".encode())
    return digest.hexdigest()[:12]


def find_file(module: str, root: Path = ROOT, folders: Sequence[Path] = ()) -> Path | None:
    """The file of a followed module: one of ours, or one of the plugin folders."""
    names = module.removeprefix(BELOW).split(".")
    for folder in (root,) if names[0] in PACKAGES else folders:
        path = folder.joinpath(*names)
        for found in (path.with_suffix(".py"), path / "__init__.py"):
            if found.is_file():
                return None if found.relative_to(folder).as_posix().startswith(NOT_FOLLOWED) else found
    return None


def _plugin_folder(place: Definition) -> Path | None:
    """The folder on the path that a plugin was imported from; None for one of ours, and for a library."""
    file = getattr(sys.modules.get(place.module), "__file__", None)
    if place.module.removeprefix(BELOW).partition(".")[0] in PACKAGES or file is None or "site-packages" in file:
        return None
    path = Path(file)
    return path.parents[place.module.count(".") + (path.name == "__init__.py")]


def differences(then: Mapping[str, str], here: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Entries that differ: name → (then, here)."""
    names = sorted(then.keys() | here.keys()) if then else []
    return {
        name: (then.get(name, "not known"), here.get(name, "not known"))
        for name in names
        if then.get(name) != here.get(name)
    }
