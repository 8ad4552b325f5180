"""The code of a run: every file that its weights come from."""

import importlib
import shutil
from pathlib import Path

import pytest

from schemas.fields import Lane
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.origin import ROOT, SOURCES, code_hash, differences, modules
from trainer.learners.scripted import ScriptedLearner


def test_a_change_of_any_file_that_makes_a_step_is_other_code(tmp_path: Path) -> None:
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    assert code_hash(root=tmp_path) == code_hash()
    for name in ("schemas/bulk.py", "trainer/losses/losses.py", "infra/model/vision.py", "infra/store/images.py"):
        code_hash.cache_clear()
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(before + "X = 1\n")
        assert code_hash(root=tmp_path) != code_hash()
        (tmp_path / name).write_text(before)


def test_a_run_is_told_by_its_own_losses_and_learner_also_where_they_are_plugins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loss_of_origin.py").write_text("from half_of_origin import half as mine\n")
    (tmp_path / "half_of_origin.py").write_text("def half(x):\n    return x / 2\n")
    importlib.import_module("loss_of_origin")
    lanes: dict[Lane, LaneConfig] = {"usual": LaneConfig(loss="loss_of_origin:mine"), "expert": LaneConfig(loss="sft")}
    named = modules(TrainerConfig(lanes=lanes), ScriptedLearner())
    assert named == ("loss_of_origin", "trainer.learners.scripted", "trainer.losses.losses")
    before = code_hash(named)
    (tmp_path / "half_of_origin.py").write_text("def half(x):\n    return x / 3\n")
    code_hash.cache_clear()
    assert before != code_hash(named) != code_hash(("numpy",)) != code_hash()


def test_a_run_whose_code_was_another_differs_and_promises_no_bits() -> None:
    here = {"code": code_hash(), "device": "cpu"}
    assert differences({"code": "5e849ac165a8", "device": "cpu"}, here) == {"code": ("5e849ac165a8", here["code"])}
    assert differences(here, here) == {}
