"""What the bits of a learner depend on is told apart."""

from pathlib import Path

import pytest

from trainer.learners.numerics import cpu_model, numerics

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 207
model name\t: Intel(R) Xeon(R) Processor

processor\t: 1
vendor_id\t: Other
"""
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


@pytest.mark.parametrize(("told", "named"), [(X86, "GenuineIntel 6 207"), (ARM, "0x41 0xd40")])
def test_a_cpu_is_named_by_vendor_family_and_model(told: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(told)
    assert cpu_model(file) == named


def test_a_cpu_of_which_nothing_is_told_has_a_name_too(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    assert cpu_model(tmp_path / "missing") and cpu_model(tmp_path / "empty")


def test_two_models_of_cpu_are_a_difference_even_of_one_instruction_set() -> None:
    here = numerics("cpu")
    assert here["cpu_model"] == cpu_model() and set(here) == {"torch", "device", "cpu", "cpu_model", "threads"}
