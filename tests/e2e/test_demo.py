"""The whole system through the real broker: a model learns, every experience is accounted for, whatever is killed."""

import subprocess
from pathlib import Path

import pytest

from tests.e2e.demo_run import OwnLedger, kill_role, run_demo, wait_for

pytestmark = pytest.mark.slow
LEARNING = {"all rewards equal", "kept for validation"}


def check_promises(report: dict, ledger: OwnLedger) -> None:
    """What holds for every run, killed or not."""
    assert report["audit_clean"] and report["pending"] == 0
    assert report["experiences_published"] == len(ledger.acknowledged)
    trained = {name for name, _, _ in ledger.trained}
    assert trained <= ledger.acknowledged
    assert report["experiences_trained"] == len(trained)
    assert report["experiences_trained"] + sum(report["dropped"].values()) == len(ledger.acknowledged)
    assert max(ledger.trained.values()) == 1, "an (id, revision, use) stands in the journal twice"
    assert ledger.stale_tokens == 0 and report["staleness_max"] <= 2
    assert report["mismatch_abs_max"] is None or report["mismatch_abs_max"] <= 1e-4
    assert report["accuracy_final"] > report["accuracy_after_sft"] > report["accuracy_start"]


def test_a_model_learns_through_the_torch_engine(tmp_path: Path) -> None:
    report = run_demo(tmp_path / "run", "--engine", "torch", "--minutes", "0.3", "--seed", "2")
    check_promises(report, OwnLedger(tmp_path / "run"))
    assert report["requests_failed"] == 0 and report["restarts"] == {}


def test_a_model_learns_through_vllm(tmp_path: Path) -> None:
    report = run_demo(tmp_path / "run", "--minutes", "0.4", "--seed", "2")
    check_promises(report, OwnLedger(tmp_path / "run"))
    assert report["requests_failed"] == 0 and report["restarts"] == {}


def test_every_role_and_the_broker_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def kill(process: subprocess.Popen[bytes]) -> None:
        wait_for(lambda: "reloaded version=3" in text(folder / "logs" / "explore.log"), "rollouts")
        for role in ("train", "process", "explore", "master", "kafka"):
            assert process.poll() is None
            kill_role(folder, role)
            reloads = text(folder / "logs" / "explore.log").count("reloaded version=")
            wait_for(
                lambda seen=reloads: text(folder / "logs" / "explore.log").count("reloaded version=") > seen + 1,
                f"learning goes on after {role} was killed",
            )

    report = run_demo(folder, "--engine", "torch", "--minutes", "1.3", "--seed", "2", meanwhile=kill)
    assert sum(report["restarts"].values()) >= 5
    check_promises(report, OwnLedger(folder))
    unlearned = sum(count for reason, count in report["dropped"].items() if reason not in LEARNING)
    assert unlearned <= 0.02 * report["experiences_published"], report["dropped"]


def text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
