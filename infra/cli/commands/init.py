"""`headrace init DIR`: a folder to begin with, copied from `infra/cli/examples`, which `headrace check` accepts with a model.

Guarantee: nothing that is there is overwritten.
"""

import logging
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from infra.cli.options import command
from infra.cli.terminal import Screen
from schemas.errors import ConfigError

EXAMPLES = Path(__file__).parents[1] / "examples"
ENGINES = {"vllm": "actors.engines.vllm.engine:VllmEngine", "torch": "actors.engines.torch:TorchEngine"}
SETTINGS = "headrace.toml"


@command
def init(
    directory: Annotated[Path, typer.Argument(help="Folder to write, created if it does not exist.")],
    model: Annotated[str, typer.Option(help="Model folder, or a name in the local Hugging Face cache.")] = "model",
    engine: Annotated[str, typer.Option(help="Engine: vllm or torch.")] = "vllm",
    example: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="EXAMPLE",
            help="agent (learns from traffic), sentence (tasks with answers), guess (turns with an environment), program (an "
            "agent that knows a base URL), openai_agents (one of that SDK), verifiers (environments of that package) or "
            "machines (one trainer on several).",
        ),
    ] = "agent",
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Also write a model of 0.9 M parameters with random weights, for a first try."),
    ] = False,
) -> int:
    """Write a starting folder: a commented headrace.toml, a plugin folder and a README.

    Example: [cyan]headrace init support --model Qwen/Qwen3-0.6B[/], [cyan]headrace init mine --from program --tiny[/]
    """
    if engine not in ENGINES:
        raise ConfigError(f"--engine: got {engine!r}, expected one of {', '.join(ENGINES)}")
    files = example_files(example)
    if tiny and (Path(model).is_absolute() or len(Path(model).parts) != 1):
        raise ConfigError(f"--tiny: got --model {model!r}, expected a name for the folder that it writes")
    if there := [directory / name for name in files if (directory / name).exists()]:
        raise ConfigError(f"{there[0]}: exists already; choose another folder")
    console = Screen()
    for name, source in files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        if name == SETTINGS:
            text = source.read_text(encoding="utf-8")
            target.write_text(filled(text, example, directory, model, engine), encoding="utf-8")
        console.print(f"wrote {target}")
    if tiny:
        from infra.cli.demo.char_model import build_char_model

        logging.disable(logging.WARNING)  # DeepSpeed warns at its import that there is no GPU
        built = build_char_model(directory / model, seed=0)
        logging.disable(logging.NOTSET)
        console.print(f"wrote {built}, a model of 0.9 M parameters with random weights")
    where = directory / SETTINGS
    console.print(f"next: headrace check -c {where}, then headrace up -c {where}", soft_wrap=True)
    return 0


def example_files(example: str) -> dict[str, Path]:
    """The files of an example by their path within it. Raises ConfigError for one that is not there."""
    known = sorted(folder.name for folder in EXAMPLES.iterdir() if (folder / SETTINGS).is_file())
    if example not in known:
        raise ConfigError(f"--from: got {example!r}, expected one of {', '.join(known)}")
    found = sorted(path for path in (EXAMPLES / example).rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {path.relative_to(EXAMPLES / example).as_posix(): path for path in found}


def filled(text: str, example: str, directory: Path, model: str, engine: str) -> str:
    for before, after in (
        (f'app = "{example}"', f'app = "{app_name(directory)}"'),
        ('model = "model"', f'model = "{model}"'),
        (f'use = "{ENGINES["vllm"]}"', f'use = "{ENGINES[engine]}"'),
    ):
        assert text.count(before) == 1, f"{example}: expected {before} once"
        text = text.replace(before, after)
    return text


def app_name(directory: Path) -> str:
    """A topic prefix after the folder.

    >>> app_name(Path("/srv/Support Bot"))
    'support-bot'
    """
    return re.sub("[^a-z0-9]", "-", directory.resolve().name.lower()).strip("-") or "headrace"
