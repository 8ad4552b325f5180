"""The whole system through the real broker: a model learns, every experience is accounted for, whatever is killed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.crash_loop import TARGETS, crash_loop, last_words, plan_shots

pytestmark = pytest.mark.slow
LIMIT_S = 400.0
NUM_VERSIONS = 20  # enough to learn; how long they take is the machine's
LEARNING = {"all rewards equal", "kept for validation"}


def headrace(folder: Path, *arguments: object) -> dict[str, Any]:
    """Output of a command as JSON. folder: of the run, whose logs are shown if the command fails."""
    command = [sys.executable, "-m", "infra.cli.main", *map(str, arguments), "--json"]
    printed, said = (folder.parent / f"{folder.name}.{end}" for end in ("out", "err"))
    with printed.open("wb") as output, said.open("wb") as errors:
        code = subprocess.run(command, stdout=output, stderr=errors, timeout=LIMIT_S).returncode
    assert code == 0, printed.read_text()[-1000:] + said.read_text()[-2000:] + last_words(folder)
    report: dict[str, Any] = json.loads(printed.read_text())
    return report


def check_promises(report: dict[str, Any]) -> None:
    """Check the promises that hold for every run, killed or not."""
    assert report["audit_clean"] and report["pending"] == 0
    assert report["experiences_trained"] + sum(report["dropped"].values()) == report["experiences_published"]
    assert report["staleness_max"] <= 2
    assert report["mismatch_abs_max"] is None or report["mismatch_abs_max"] <= 1e-4
    assert report["accuracy_final"] > report["accuracy_after_sft"] > report["accuracy_start"]


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run in peace, through vLLM, its promises checked."""
    folder = tmp_path_factory.mktemp("unkilled") / "run"
    stop = ("--set", f"master.stop.versions={NUM_VERSIONS}")
    report = headrace(folder, "demo", "--task", "add", "--dir", folder, *stop, "--seed", "2")
    check_promises(report)
    return report | {"folder": folder}


def test_a_model_learns_through_vllm(unkilled: dict[str, Any]) -> None:
    assert unkilled["requests_failed"] == 0 and unkilled["restarts"] == {}
    assert unkilled["mismatch_abs_max"] > 0.0, "engine and trainer were never compared"


def test_the_run_is_done_again_to_the_bit_from_an_archive_of_it(unkilled: dict[str, Any]) -> None:
    """From its folder it is done again where all roles were killed."""
    folder: Path = unkilled["folder"]
    archive = folder.parent / "run.headrace"
    headrace(folder, "export", folder, archive)
    whole = headrace(folder, "replay", archive, "--verify")
    assert whole["equal"] and whole["bits_promised"] and not whole["faults"]
    assert whole["from_step"] == -1 and whole["steps"] == unkilled["steps"] + unkilled["warmup_steps"]
    checkpoints = {item["step"] for item in whole["checkpoints"]}
    assert len(checkpoints) >= 3 and whole["to_step"] in checkpoints


@pytest.mark.full
async def test_every_role_and_the_broker_may_be_killed_at_any_moment(tmp_path: Path, unkilled: dict[str, Any]) -> None:
    """Ten shots at moments of chance, two at each role and at the broker; the whole loop is `tests/e2e/crash_loop.py`."""
    report: dict[str, Any] = await crash_loop(tmp_path / "run", plan_shots(10, 7, (0.5, 4.0)), seed=7, minutes=5.0)
    assert report["kills"] + report["stops"] == 10, report
    assert not report["lost"] and not report["trained_twice"] and not report["stale"], report
    assert report["audit_clean"] and report["pending"] == 0, report
    assert report["replay_equal"], report
    assert set(report["shots"]) == set(TARGETS), report
    in_peace = unlearned(unkilled, unkilled["experiences_published"])
    for reason, share in unlearned(report, report["acknowledged"]).items():
        assert share <= in_peace.get(reason, 0.0) + 0.02, f"{reason}: {share:.3f}, in peace {in_peace}"


def unlearned(report: dict[str, Any], total: int) -> dict[str, float]:
    """Shares of what was dropped for other reasons than what the model had learned. An attempt that another attempt of its
    group made superfluous took nothing away.
    """
    total -= report["dropped"].get("superseded", 0)
    counted = {reason: count for reason, count in report["dropped"].items() if reason not in {*LEARNING, "superseded"}}
    return {reason: count / total for reason, count in counted.items()}
