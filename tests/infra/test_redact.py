"""Texts that count as personal data or secrets, texts that do not, and a search that is bounded and linear."""

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from infra.chain.redact import KINDS, MAX_LOOK, MAX_ROW, PIECE, REACH, Redactor, matches
from schemas import ids

BASE64 = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
PEM = f"-----BEGIN PRIVATE KEY-----\n{BASE64}\n{BASE64}\nAb3+/x==\n-----END PRIVATE KEY-----"
SSH = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{BASE64}\n{BASE64[:20]}"
OLD = f"-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,0F3A\n\n{BASE64}\n" + (
    "-----END RSA PRIVATE KEY-----"
)
AWS = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
FOUND = [
    ("write to ada.lovelace@mail.example.org.", "email", "ada.lovelace@mail.example.org"),
    ("call +44 20 7946 0958", "phone", "+44 20 7946 0958"),
    ("token ghp_abcdefghijklmnopqrstuvwx12", "key", "ghp_abcdefghijklmnopqrstuvwx12"),
    ("-----BEGIN RSA PRIVATE KEY-----", "key", "-----BEGIN RSA PRIVATE KEY-----"),
    (f"see {PEM} there", "key", PEM),
    (f"see {SSH}", "key", SSH),
    (f"see {OLD} there", "key", OLD),
    ('{"k": "' + PEM.replace("\n", "\\n") + '"}', "key", PEM.replace("\n", "\\n")),
    (f"aws_secret_access_key = {AWS}", "key", AWS),
    (f'"SecretAccessKey": "{AWS}"', "key", AWS),
    (f"it is {AWS}, keep it", "key", AWS),
    ("AKIAIOSFODNN7EXAMPLE", "key", "AKIAIOSFODNN7EXAMPLE"),
    (f"Bearer {JWT}", "key", JWT),
    ("github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz", "key", "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz"),
    ("gho_abcdefghijklmnop1234", "key", "gho_abcdefghijklmnop1234"),
    ("glpat-abcdefghij_-klmnopqr", "key", "glpat-abcdefghij_-klmnopqr"),
    ("AIzaSyA-1234567890abcdefghijklmnopqrstu", "key", "AIzaSyA-1234567890abcdefghijklmnopqrstu"),
    ("GOCSPX-abcdefghijklmnop1234", "key", "GOCSPX-abcdefghijklmnop1234"),
    ("sk-" + "a1" * 200, "key", "sk-" + "a1" * 200),
    ("pay DE89 3704 0044 0532 0130 00 now", "iban", "DE89 3704 0044 0532 0130 00"),
    ("GB82WEST12345698765432.", "iban", "GB82WEST12345698765432"),
    ("to NL91 ABNA 0417 1643 00 AND MORE", "iban", "NL91 ABNA 0417 1643 00"),
    ("my number is 078-05-1120.", "ssn", "078-05-1120"),
    ("call (415) 555-0123 now", "phone", "(415) 555-0123"),
    ("415-555-0123", "phone", "415-555-0123"),
    ("1-415-555-0123", "phone", "1-415-555-0123"),
    ("01 23 45 67 89", "phone", "01 23 45 67 89"),
    ("Tel. 030 12345678", "phone", "030 12345678"),
    ("01.23.45.67.89", "phone", "01.23.45.67.89"),
    ("030/12345678", "phone", "030/12345678"),
    ("020 7946 0958", "phone", "020 7946 0958"),
    ("0049 30 1234567", "phone", "0049 30 1234567"),
    ("+44\u00a020\u00a07946\u00a00958", "phone", "+44\u00a020\u00a07946\u00a00958"),
    ("4111\u00a01111\u00a01111\u00a01111", "card", "4111\u00a01111\u00a01111\u00a01111"),
    ("It is 4111 1111 1111 1111.", "card", "4111 1111 1111 1111"),
    ("1 4111 1111 1111 1111 2", "card", "4111 1111 1111 1111"),
    ("3782 822463 10005", "card", "3782 822463 10005"),
    ("4111\u20111111\u20111111\u20111111", "card", "4111\u20111111\u20111111\u20111111"),
]


@pytest.mark.parametrize(("text", "kind", "what"), FOUND)
def test_what_is_found_is_masked_and_nothing_else(text: str, kind: str, what: str) -> None:
    assert Redactor().mask(text) == (text.replace(what, f"[{kind}]"), {kind})
    assert Redactor().mask(f"{'words, ' * 5000}{text}")[0].endswith(text.replace(what, f"[{kind}]"))


GROUP = ids.request_group("mddrffqvmjcncqrrjhvnrntq" + "mddrffqv" * 5, 2**62 + 12345678901, 4111111111111111)
INNOCENT = [
    ids.answer_id(ids.experience_id(GROUP, 0, 7)),
    ids.synthetic_group(("a", "b"), "correct@1", 0),
    "da39a3ee5e6b4b0d3255bfef95601890afd80709",  # SHA-1, as git names a commit
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "123e4567-e89b-12d3-a456-426614174000",
    "2026-11-21 10:00:00, 01.02.2024 10:30, 05/11/2026 1030, 10:20:30",
    "3.14159265358979, 1e-10, 0.1234567890123456789, 192.168.100.200, 010.020.030.040",
    "00 01 02 03 04 05 06 07 08 09 0a 0b; 01 02 03 04 05 06 07 08",
    "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24",
    "200 300 4000, 415 555 0123, 02139-4307",
    "def hf_hub_download_from_the_cache(skateboarding_championship_of_2026, pkg_resources_are_not_here): ...",
    "eyJust.eyJust words", "a@b", "@decorator", "x @ y", "-----BEGIN CERTIFICATE-----", "skeleton-key",
    "DE00 3704 0044 0532 0130 00", "XX89370400440532013000", "000-12-3456, 900-12-3456, 123-45-67890",
    "/usr/lib/python3.11/site-packages/transformers/models",
    "37+45=82", "4111 1111 1111 1112", "1234567890123456",
]  # fmt: skip


@pytest.mark.parametrize("text", INNOCENT)
def test_ids_dates_numbers_and_code_are_left_alone(text: str) -> None:
    assert Redactor().mask(text) == (text, frozenset())


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.sampled_from(FOUND))
def test_what_stands_around_it_hides_nothing(before: str, after: str, what: tuple[str, str, str]) -> None:
    masked, _ = Redactor().mask(f"{before} | {what[2]} | {after}")
    assert what[2] not in masked


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="a1@.-+ (:/=\n", max_size=80)
    | st.lists(st.sampled_from([one for one, _, _ in FOUND]), max_size=MAX_ROW).map(" ".join)
)
@example("01 23 45 67 89 030/12345678 030/12345678")
@example(" ".join(["01 23 45 67 89"] * MAX_ROW + ["030/12345678"]))
def test_masking_again_finds_nothing_more_than_masks(text: str) -> None:
    once = Redactor().mask(text)[0]
    twice = Redactor().mask(once)[0]  # a card within a row of digits shows once its neighbours are masked
    assert Redactor().mask(twice)[0] == twice


class Looking:
    """A pattern that writes down where it is asked to look."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern)
        self.looks: list[tuple[int, int]] = []

    def finditer(self, text: str, pos: int, endpos: int, /) -> Iterator["re.Match[str]"]:
        self.looks.append((pos, endpos))
        return self._pattern.finditer(text, pos, endpos)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3 * MAX_LOOK), st.integers(1, REACH), st.integers(0, 3 * MAX_LOOK))
def test_no_look_is_longer_than_the_bound_and_what_lies_between_pieces_is_found(
    size: int, long: int, place: int
) -> None:
    looking = Looking("x+")
    text = "." * min(place, size) + "x" * long + "." * max(0, size - place)
    found = [match.group() for match in matches(looking, text)]
    assert found == ["x" * long]
    assert all(end - begin <= MAX_LOOK for begin, end in looking.looks)
    assert len(looking.looks) <= len(text) // PIECE + 1


HOSTILE = {
    "a": "a", "dots": "a.", "at": "a@", "ats": "@", "local": "a" * 63 + "@", "domain": "@" + "a." * 9, "digits": "1 ",
    "plus": "+1 ", "sk": "sk-", "eyJ": "eyJ-", "eyJ.": "eyJaaaaaaaa.", "begin": "-----BEGIN PRIVATE KEY-----", "dashes": "-",
    "begin dashes": "-----BEGIN ", "lines": "\n", "secret": "secret_key=", "secrets": "secret ", "base64": "Aa1/" * 10 + " ",
    "iban": "DE89", "iban ": "DE89 3704 ", "ssn": "123-45-", "zeros": "01 ", "us": "415-555-", "run": "1", "key lines": "k: \n",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_the_time_is_linear_in_the_text_whatever_it_says(name: str) -> None:
    """Four times the text takes some four times the processor; what was quadratic took sixteen."""
    redactor = Redactor()
    redactor.mask("x")

    def cpu_s(size: int) -> float:
        text = (HOSTILE[name] * size)[:size]
        took = []
        for _ in range(2):
            begin = time.thread_time()
            redactor.mask(text)
            took.append(time.thread_time() - begin)
        return min(took)

    small, large = cpu_s(20_000), cpu_s(80_000)
    assert large < 9 * small + 0.01


def test_json_is_masked_all_through() -> None:
    given: Any = {"a@b.example": [1, {"x": "078-05-1120"}, 4111111111111111, True, None, 1.5]}
    assert Redactor().mask_json(given) == {"[email]": [1, {"x": "[ssn]"}, "[card]", True, None, 1.5]}
    assert set(KINDS) >= {"email", "card", "phone", "key"}
