"""Built-in scores, each on right answers and on wrong ones that fool naive checkers."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from schemas import Experience, Message, Span, ids, make_experience
from schemas.errors import ConfigError
from streams.scores.exact import exact
from streams.scores.format import Format
from tests.infra.sandbox.confining import sandbox_or_skip


def matched(text: str, pattern: str) -> float:
    with closing(Format(pattern=pattern)) as score:
        return score(answer(text))


def answer(text: str, expected: str | None = "280") -> Experience:
    return make_experience(
        tokens=[1, 2],
        logprobs=[-0.1],
        messages=[
            Message(role="user", content="37+45="),
            Message(role="assistant", content=text),
            Message(role="user", content="280"),
        ],
        id=ids.experience_id("t.0", 0, 0),
        group="t.0",
        episode=0,
        group_size=1,
        spans=(Span(1, 2, 3),),
        answer=expected,
    )


@pytest.mark.parametrize(
    ("text", "expected", "options", "value"),
    [
        ("280", "280", {}, 1.0),
        (" 280\n", "280", {}, 1.0),
        (" 280\n", "280", {"strip": False}, 0.0),
        ("2800", "280", {}, 0.0),
        ("1280", "280", {}, 0.0),
        ("280 281", "280", {}, 0.0),
        ("", "280", {}, 0.0),
        ("", "", {}, 1.0),
        ("Paris", "paris", {}, 0.0),
        ("Paris", "paris", {"case": False}, 1.0),
        ("STRASSE", "straße", {"case": False}, 1.0),
        ("caf\u0065\u0301", "caf\u00e9", {}, 1.0),
        ("280", None, {}, None),
    ],
)
def test_exact(text: str, expected: str | None, options: dict[str, Any], value: float | None) -> None:
    assert exact(answer(text, expected), **options) == value


def test_exact_reads_the_reference_from_the_key_it_is_told() -> None:
    assert exact(answer("280", "280"), answer="other") is None
    assert exact(replace(answer("280", None), meta={"answer": "280"})) is None, "meta is no reference unasked"
    assert exact(replace(answer("280", "281"), meta={"other": 280}), answer="other") == 1.0


THINK = r"<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<think>7+5=12\ncarry</think>\n<answer>280</answer>", 1.0),
        ("  <think></think><answer></answer>  ", 1.0),
        ("first <think>a</think><answer>280</answer>", 0.0),
        ("<think>a</think><answer>280</answer> or 281", 0.0),
        ("<think>a</think><answer>280</answer><answer>281</answer>", 0.0),
        ("<think>a<think>b</think><answer>280</answer>", 0.0),
        ("<answer>280</answer><think>a</think>", 0.0),
        ("<think>a</think><answer>280", 0.0),
        ("", 0.0),
    ],
)
def test_format_wants_the_whole_response_in_shape(text: str, value: float) -> None:
    assert matched(text, THINK) == value


def test_format_counts_an_endless_response_as_out_of_shape() -> None:
    assert matched("a" * 100_000, "a*") == 0.0


def test_a_pattern_that_backtracks_without_end_is_given_up_and_the_next_answer_is_matched() -> None:
    with closing(Format(pattern="(a+)+b", timeout_s=0.2)) as score:
        with pytest.raises(TimeoutError):
            score(answer("a" * 64))
        assert score(answer("aab")) == 1.0


def test_a_pattern_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="which is no regular expression"):
        Format(pattern="(a")


SETTINGS = """
app = "scores"

[policy]
name = "main"

[[score]]
name = "exact"
use = "streams.scores.exact:exact"

[[score]]
name = "format"
use = "streams.scores.format:format"
options = { pattern = ".*" }

[[score]]
name = "math"
use = "streams.scores.math:Math"

[[score]]
name = "code"
use = "streams.scores.code:Code"
options = { partial = true, limits = { wall_s = 5.0, memory_bytes = 268435456 } }
timeout_s = 60

[[score]]
name = "school"
use = "streams.scores.k12:k12"
options = { tolerance = 0.02 }

[[score]]
name = "seen"
use = "streams.scores.vision:vision"
options = { kind = "box", format = "xywh", threshold = 0.7 }

[[score]]
name = "judge"
use = "streams.scores.llm_judge:Judge"
options = { endpoint = { url = "http://127.0.0.1:9/v1", model = "judge" }, high = 5 }

[[score]]
name = "rubric"
use = "streams.scores.rubric:Rubric"
options = { endpoint = { url = "http://127.0.0.1:9/v1", model = "judge" }, criteria = ["short", { text = "true", weight = 2 }] }

[[score]]
name = "learned"
use = "streams.scores.model:Model"
options = { folder = "FOLDER", policy = "reward" }

[reward]
blend = { code = 1.0, learned = 0.5 }
"""


@pytest.mark.slow
def test_check_wires_every_score_with_its_options(tmp_path: Path) -> None:
    sandbox_or_skip()
    (tmp_path / "config.json").write_text(json.dumps({}))
    path = tmp_path / "headrace.toml"
    path.write_text(SETTINGS.replace("FOLDER", str(tmp_path)), encoding="utf-8")
    command = [sys.executable, "-m", "infra.cli.main", "check", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("exact", "format", "math", "code", "school", "seen", "judge", "rubric", "learned"):
        assert f" {name} " in done.stdout, done.stdout
