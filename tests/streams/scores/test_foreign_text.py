"""Scores on text that somebody wrote to hold the worker: the same verdicts as before, in time linear in the text."""

import resource
import subprocess
import sys
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from streams.scores.exact import _MARKS_BY_PARTS, exact, normalized
from tests.streams.scores.answers import answered


@given(st.text(max_size=80))
def test_text_is_normalized_as_unicode_says(text: str) -> None:
    assert normalized(text) == unicodedata.normalize("NFC", text)


def test_only_the_named_letters_are_made_of_marks_alone() -> None:
    found = {
        letter
        for letter in map(chr, range(sys.maxunicode + 1))
        if not unicodedata.combining(letter) and all(map(unicodedata.combining, unicodedata.normalize("NFKD", letter)))
    }
    assert found == set(_MARKS_BY_PARTS)


@given(st.text(alphabet="ae\u0301\u0300é\u1f82\u0f73 ", max_size=12), st.text(alphabet="ae\u0301é\u1f82", max_size=4))
def test_exact_still_means_equal_in_normal_form_c(text: str, wanted: str) -> None:
    equal = unicodedata.normalize("NFC", text.strip()) == unicodedata.normalize("NFC", wanted.strip())
    assert exact(answered(text, answer=wanted)) == float(equal)


# Each grew with the square of its length, or faster: the shortest took 4 s for 10,000 characters, so hours for these.
HOLD = """
import unicodedata
from streams.processors.task_filter import clean
from streams.scores import code, exact, math
from streams.scores.instructions import follows
from schemas import Message, Task
N = 400_000
for text in ("(" * N, "\\\\boxed{" + "{" * N, "answer " * (N // 7), "answer" + " " * N, "1 " * (N // 2), "1," * (N // 2)):
    math.final_answer(text[-math.MAX_LINE_CHARS:]); math.final_answer(text)
for text in ("```a\\n" * (N // 5), "```\\n" * (N // 4), " " * N + "```"):
    code.answer_code(text)
for text in ("a" + "\\u0315\\u0300" * (N // 2), "a" + "\\u0315\\uff9e" * (N // 2)):
    exact.is_exact(text, text[::-1])
for text in ("a" * N, "a." + ")" * N + "a"):
    follows(text, "sentences", 1)
follows("```" + " " * N + "x", "json", ["a"])
clean(Task(id="t", messages=(Message(role="user", content=("a" + " " * N + "b")),)))
print("done")
"""


def test_no_text_holds_a_score_longer_than_its_length_says() -> None:
    """All of them at once in far less processor time than one of them took."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))

    ran = subprocess.run([sys.executable, "-c", HOLD], capture_output=True, text=True, preexec_fn=limit, check=False)
    assert ran.stdout == "done\n", ran.stderr[-2000:]
