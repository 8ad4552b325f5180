"""What a run's code is: what its weights come from, and nothing else."""

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.fields import Lane
from trainer.config import LaneConfig, TrainerConfig
from trainer.journal.origin import PACKAGES, ROOT, ROOTS, Definition, code_hash, differences, places
from trainer.learners.scripted import ScriptedLearner

RUN = (*ROOTS, Definition("trainer.learners.torch", "TorchLearner"), Definition("trainer.losses.losses", "grpo"))
# A file of the sources, what stands in it, and what it becomes.
Edit = tuple[str, str, str]

NO_BIT_CHANGES: dict[str, Edit] = {
    "a comment in the learner": ("trainer/learners/torch.py", "import math\n", "import math  # of floats\n\n# more\n"),
    "a docstring of packing": ("trainer/batch/batch.py", '    """', '    """Or in other words: '),
    "a docstring of a module": ("infra/model/vision.py", '"""', '"""Said anew. '),
    "the trainer's report": ("trainer/loop/report.py", "PERIOD_S = 1.0", "PERIOD_S = 2.0"),
    "a screen": ("infra/cli/exit_codes.py", "FAILED = 1", "FAILED = 9"),
    "a field of a report": ("schemas/records.py", 'reason: str = ""', 'reason: str = ""\n    mood: str = ""'),
    "another lane's loss": (
        "trainer/losses/losses.py",
        "LossOutput(gradient_term",
        "LossOutput(2 * gradient_term",
    ),
    "how objects are fetched": ("infra/store/s3.py", "class S3Store", "class S4Store"),
    "a setting's bounds": ("infra/settings/config.py", "class Pacing", "FURTHER = 1\n\n\nclass Pacing"),
    "a function beside those that are used": ("infra/policies/tensors.py", "ITEM_BYTES", "UNUSED = 1\nITEM_BYTES"),
}
BITS_MAY_CHANGE: dict[str, Edit] = {
    "how pictures are prepared": ("infra/model/vision.py", "def prepare(self", "def prepare(self, more"),
    "how pictures are decoded": ("infra/store/images.py", "MAX_PIXELS = ", "MAX_PIXELS = 1 + "),
    "how tokens are read": ("schemas/bulk.py", "np.uint32", "np.uint64"),
    "how sections are cut": ("schemas/bulk.py", "WIDTHS", "WIDE"),
    "what a member of a block is": ("schemas/fields.py", "ratio: bool = True", "ratio: bool = False"),
    "the teacher's logprobs": ("schemas/wire/teacher.py", "WIDTH", "WIDE"),
    "how items are packed": ("trainer/batch/batch.py", "ATTENTION_TOKENS = ", "ATTENTION_TOKENS = 1 + "),
    "the learning rate": (
        "trainer/batch/assemble.py",
        "return config.learning_rate",
        "return 2 * config.learning_rate",
    ),
    "the lane's loss": ("trainer/losses/losses.py", "loss + kl * k3(", "loss + 2 * kl * k3("),
    "a helper of the loss": ("trainer/losses/offpolicy.py", "def clipped_surrogate(", "def clipped_surrogate(more, "),
    "the forward": ("trainer/learners/forward.py", "MAX_LOGITS = ", "MAX_LOGITS = 1 + "),
    "how weights are loaded": ("infra/model/model.py", "def load_model(", "def load_model(more, "),
    "the dtype of a tensor": ("infra/policies/tensors.py", "ITEM_BYTES", "ITEM_SIZES"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources."""
    folder = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return folder


@pytest.fixture(scope="module")
def before(sources: Path) -> str:
    return hashed(sources)


def hashed(sources: Path) -> str:
    code_hash.cache_clear()
    return code_hash(RUN, sources)


def edited(sources: Path, edit: Edit) -> str:
    """The hash with the first such text another."""
    file, old, new = edit
    path = sources / file
    text = path.read_text()
    assert old in text, f"{file}: no {old!r} in it: the test is about other sources"
    path.write_text(text.replace(old, new, 1))
    try:
        return hashed(sources)
    finally:
        path.write_text(text)


@pytest.mark.parametrize("what", NO_BIT_CHANGES)
def test_what_changes_no_bit_leaves_the_code_equal(sources: Path, before: str, what: str) -> None:
    assert edited(sources, NO_BIT_CHANGES[what]) == before


@pytest.mark.parametrize("what", BITS_MAY_CHANGE)
def test_what_may_change_the_bits_makes_it_other_code(sources: Path, before: str, what: str) -> None:
    assert edited(sources, BITS_MAY_CHANGE[what]) != before


def test_a_definition_that_moves_to_another_file_is_the_same_code(sources: Path, before: str) -> None:
    (sources / "trainer" / "places.py").write_text((sources / "trainer" / "learners" / "opening.py").read_text())
    moved = ("trainer/learners/forward.py", "from trainer.learners.opening import", "from trainer.places import")
    assert edited(sources, moved) == before


def test_a_name_that_stands_for_another_definition_is_other_code(sources: Path, before: str) -> None:
    (sources / "trainer" / "other.py").write_text(
        "def Paths(*given):\n    return given\ndef unpacked(*given):\n    return given\n"
    )
    other = ("trainer/learners/forward.py", "from trainer.batch.split import", "from trainer.other import")
    assert edited(sources, other) != before


@pytest.fixture
def on_path(tmp_path: Path) -> Iterator[Path]:
    """A plugin folder."""
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))
    code_hash.cache_clear()


def test_a_run_is_told_by_its_own_losses_and_learner_also_where_they_are_plugins(on_path: Path) -> None:
    (on_path / "loss_of_origin.py").write_text(
        "from half_of_origin import half\n\n\ndef mine(x):\n    return half(x)\n"
    )
    helper = on_path / "half_of_origin.py"
    helper.write_text("def half(x):\n    return x / 2\n")
    importlib.import_module("loss_of_origin")
    lanes: dict[Lane, LaneConfig] = {"usual": LaneConfig(loss="loss_of_origin:mine"), "expert": LaneConfig(loss="sft")}
    named = places(TrainerConfig(lanes=lanes), ScriptedLearner())
    assert set(named) - set(ROOTS) == {
        Definition("trainer.learners.scripted", "ScriptedLearner"),
        Definition("loss_of_origin", "mine"),
        Definition("trainer.losses.losses", "sft"),
    }
    before = code_hash(named)
    helper.write_text('def half(x):\n    """The half."""\n    return x / 2  # exactly\n')
    code_hash.cache_clear()
    assert code_hash(named) == before
    helper.write_text("def half(x):\n    return x / 3\n")
    code_hash.cache_clear()
    assert code_hash(named) != before


def test_a_loss_of_a_library_that_is_not_read_counts_by_its_name() -> None:
    assert (
        code_hash((*RUN, Definition("numpy", "mean")))
        != code_hash((*RUN, Definition("numpy", "sum")))
        != code_hash(RUN)
    )


def test_a_run_whose_code_was_told_otherwise_differs_and_promises_no_bits() -> None:
    here = {"code": code_hash(RUN), "device": "cpu"}
    assert differences({"code": "5e849ac165a8", "device": "cpu"}, here) == {"code": ("5e849ac165a8", here["code"])}
    assert differences(here, here) == {}
