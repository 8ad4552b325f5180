"""How vLLM's worker reads the file of a version: locked, and so that nothing of the model lies in it afterwards."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from actors.engines.vllm.worker import _check_copied, _locked
from tests.infra.weights.test_version_files import files_in, made, names_in


def test_a_file_that_a_worker_reads_is_not_written_over_though_its_engine_let_go(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    one, wanted = made(files, 1)
    with _locked(str(one.path)):
        with safe_open(one.path, framework="pt") as file:  # type: ignore[no-untyped-call]
            read = file.get_tensor("l")
        del one
        two, _ = made(files, 2)
        assert read.numpy().tobytes() == bytes(wanted["l"].data)
    three, _ = made(files, 3)
    assert names_in(tmp_path) == {two.path.name, three.path.name}


def test_a_model_that_keeps_the_memory_of_the_file_is_refused_and_one_with_copies_is_not(tmp_path: Path) -> None:
    one, _ = made(files_in(tmp_path), 1)
    with safe_open(one.path, framework="pt") as file:  # type: ignore[no-untyped-call]
        tensors = {name: file.get_tensor(name) for name in ("l", "s")}
    model = torch.nn.Module()
    model.register_buffer("l", tensors["l"].clone())
    _check_copied(tensors.values(), model)
    model.register_buffer("part", tensors["s"][:2])
    with pytest.raises(RuntimeError, match="part lies in the file itself"):
        _check_copied(tensors.values(), model)
