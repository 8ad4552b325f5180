"""Plugins: `use = "module:name"` plus options becomes the thing itself, with its options checked and bound.

Guarantee: a missing module or name, an unknown option and a wrong type are one ConfigError each; an error raised inside the
plugin's own module, SystemExit too, is a ConfigError with its cause. Only Ctrl-C passes. Names come from an operator's settings
or flags. Names that came with data are checked first: see `trainer.learners.learner.foreign_names`.
"""

import functools
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from infra.settings.config import decode, nearest
from schemas.errors import ConfigError

# Keyword-only parameters that are no options: the chain fills them in.
RESERVED_PARAMETERS = frozenset({"memory", "record_offset"})
# A shipped module is named by its folder in the repository. Where headrace is installed, that folder lies below `headrace`.
SHIPPED = ("actors", "infra", "schemas", "streams", "trainer")
BELOW = __name__.rpartition("infra.")[0]


def add_plugin_folders(folder: Path, plugins: Iterable[str]) -> None:
    """Append the configured folders to sys.path; raises ConfigError for one that is not there."""
    for name in plugins:
        path = (folder / name).resolve()
        if not path.is_dir():
            raise ConfigError(f'plugins: got "{name}", expected a folder (looked at {path})')
        if str(path) not in sys.path:
            sys.path.append(str(path))


def here(module: str) -> str:
    """The name by which a module is imported: one that ships may be installed below `headrace`."""
    return BELOW + module if module.partition(".")[0] in SHIPPED else module


def find(use: str, where: str = "use") -> object:
    """The object that `module:name` names, not called. Raises ConfigError."""
    named, colon, name = use.partition(":")
    module_name = here(named)
    if not colon or not module_name or not name:
        raise ConfigError(f'{where}: got "{use}", expected "module:name"')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        hint = "is its folder in `plugins`, or its package installed?"
        raise ConfigError(f'{where}: no module "{error.name}" ({use}); {hint}') from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{where}: importing {use} raised {describe(error)}") from error
    if not hasattr(module, name):
        raise ConfigError(f'{where}: module "{module_name}" has no "{name}"{nearest(name, dir(module))}')
    return typing.cast(object, getattr(module, name))


def load(use: str, options: Mapping[str, Any], where: str = "use") -> Any:
    """Plugin that `use` names, with its options: a function with them bound, an instance of a class, or a plain object.

    Options are keyword-only parameters of a function, fields of a msgspec struct, or parameters of a class; where they
    are annotated their types are checked. Raises ConfigError starting with `where`.
    """
    found = find(use, where)
    try:
        if isinstance(found, type):
            return _instance(found, options, where)
        if callable(found):
            return _bound(found, options, where)
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise ConfigError(f"{where}: {use} raised {describe(error)}") from error
    if options:
        raise ConfigError(f"{where}: {use} takes no options: it is of type {type(found).__name__}")
    return found


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def option_defaults(function: object) -> dict[str, Any]:
    """All options of a loaded plugin with their values, as `headrace check` prints them."""
    if isinstance(function, msgspec.Struct):
        return {name: getattr(function, name) for name in function.__struct_fields__}
    if not callable(function):
        return {}
    bare = function.func if isinstance(function, functools.partial) else function
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return {name: bound.get(name, parameter.default) for name, parameter in _option_parameters(bare).items()}


def _option_parameters(function: Callable[..., object]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in RESERVED_PARAMETERS
    }


def _instance(found: type, options: Mapping[str, Any], where: str) -> object:
    if issubclass(found, msgspec.Struct):
        return decode(dict(options), found, f"{where}.options")
    parameters = inspect.signature(found).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        check_names(options, parameters, where)
    return found(**options)


def _bound(found: Callable[..., object], options: Mapping[str, Any], where: str) -> Callable[..., object]:
    known = _option_parameters(found)
    check_names(options, known, where)
    for name, parameter in known.items():
        if name not in options and parameter.default is inspect.Parameter.empty:
            raise ConfigError(f"{where}.options.{name}: missing, {found.__qualname__} needs it")
    if not options:
        return found
    try:
        hints = typing.get_type_hints(found, include_extras=True)
    except (NameError, TypeError):  # names only a type checker sees: such options go unchecked
        hints = {}
    values = {
        name: decode(value, hints[name], f"{where}.options.{name}") if name in hints else value
        for name, value in options.items()
    }
    return functools.partial(found, **values)


def check_names(options: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise ConfigError for an option that is not among the known ones, with the nearest. where: the table of the options."""
    names = list(known)
    for name in options:
        if name not in names:
            expected = nearest(name, names) or f"; expected one of {', '.join(names)}" if names else "; it takes none"
            raise ConfigError(f"{where}.options.{name}: unknown option{expected}")
