"""model: a classifier of a folder judges; one that lacks weights is refused."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infra.chain.chain import Context, make_step, run_chain
from infra.cli.demo.char_model import CHARACTERS_ALONE, Vocabulary, build_char_model
from schemas.errors import ConfigError
from streams.scores.model import Model, probability
from tests.streams.scores.answers import answered


def classifier(folder: Path, factor: float | None, vocabulary: Vocabulary = CHARACTERS_ALONE) -> Path:
    """A character model with a head of one number; without a head for None."""
    folder = build_char_model(folder, 0, vocabulary)
    config = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "good"}, "label2id": {"good": 0}, "architectures": ["Qwen3ForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps({**config, **labels}))
    if factor is not None:
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        head = np.linspace(-factor, factor, config["hidden_size"], dtype=np.float32)[None]
        save_file(tensors | {"score.weight": head}, file, {"format": "pt"})
    return folder


@pytest.mark.slow
def test_a_classifier_judges_with_the_weights_of_its_folder(tmp_path: Path) -> None:
    found = []
    for name, factor in (("a", 0.1), ("b", -0.1)):
        step = make_step("quality", Model(folder=str(classifier(tmp_path / name, factor))), timeout_s=120)
        (member,) = asyncio.run(run_chain([step], [answered("280", prompt="37+45=")], Context())).kept
        found += [score.value for score in member.scores]
    assert found[0] == pytest.approx(1 - found[1]) and abs(found[0] - 0.5) > 1e-3, "the head's sign was turned around"


@pytest.mark.slow
def test_a_classifier_without_its_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no weights of score\.weight"):
        Model(folder=str(classifier(tmp_path / "c", None)))


def test_probabilities() -> None:
    assert probability([0.0, 1.0], -1) == pytest.approx(0.7310585786)  # 1 / (1 + e^-1)
    assert probability([1000.0, 0.0], 0) == 1.0
    with pytest.raises(ValueError, match="finite"):
        probability([float("nan")], 0)
    with pytest.raises(ValueError, match="of 2 classes"):
        probability([0.0, 0.0], 2)
