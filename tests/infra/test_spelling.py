"""Spelling without transformers is that of the policy's own tokenizer."""

from pathlib import Path

import pytest

from infra.cli.demo.char_model import build_char_model
from infra.model.model import load_tokenizer
from infra.model.spelling import TokenizerFile
from schemas.errors import ConfigError
from streams.config import CollectConfig, CorrectConfig, StreamsConfig
from streams.stages.chain_builder import build_collect

CORRECTING = StreamsConfig(collect=CollectConfig(correct=CorrectConfig(on=True)))


def test_text_is_spelled_as_a_demonstration_of_the_loader_is(tmp_path: Path) -> None:
    folder = build_char_model(tmp_path / "model", seed=0)
    reference, speller = load_tokenizer(folder), TokenizerFile(str(folder))
    for text in ("280", "", "37+45=", "<eos> in the midst", "é is unknown"):
        assert speller.encode(text) == reference.encode(text)
    assert speller.end == reference.eos_ids[0]
    assert build_collect(CORRECTING, str(folder))[0].stamp == "correct@1"


def test_a_folder_without_an_end_token_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="end token"):
        TokenizerFile(str(tmp_path))
