"""The command about published weights: export-model.

Bodies import what they need when they run: see `infra.cli.main`.
"""

from pathlib import Path
from typing import Annotated

import typer

from infra.cli.options import DEFAULT, ConfigOption, SetOption, exit_with


def export_model(
    version: Annotated[str, typer.Argument(help='A published version, "newest" or "stable".')],
    folder: Annotated[Path, typer.Argument(help="The folder to write; it must not be there, or be empty.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with [trainer.lora]: the adapter alone.")
    ] = False,
    config: ConfigOption = DEFAULT,
    sets: SetOption = [],  # noqa: B006
) -> None:
    """Write a version as a model folder: configuration, tokenizer, safetensors. transformers and vLLM load it as any other.

    A version of a run with [trainer.lora] is merged into policy.model; --adapter writes the folder that peft writes instead.
    Every tensor is verified first. headrace.json beside the weights says which version it is, and what the gate and people
    decided about it.

    Example: [cyan]headrace export-model stable ./support-v144[/]
    """
    from infra.cli.govern.export_model import run_export_model

    exit_with(lambda: run_export_model(version, folder, config, sets, adapter))
