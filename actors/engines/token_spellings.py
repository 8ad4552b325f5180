"""What each token of a vocabulary spells, and the compiler of schemas over it."""

import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from actors.engines.engine import SchemaRefused
from infra.model.model import load_tokenizer

# JSON between the values is spelled in one way, as json.dumps does: free whitespace is where a weak policy gets lost.
ONE_SPELLING = {"any_whitespace": False}
# A grammar looks at one token at a time: without one of these it can be led to where nothing may come next.
NEEDED = frozenset(string.ascii_letters + string.digits + string.punctuation + " ")


class TokenSpellings:
    """What each token spells; nothing (b"") for special tokens and for ids without a token. special: those tokens."""

    def __init__(self, spellings: Sequence[bytes], special: frozenset[int] = frozenset()) -> None:
        self.spellings = tuple(b"" if token in special else spelled for token, spelled in enumerate(spellings))
        self.special = special
        self._spelled = frozenset(self.spellings)

    def check(self, json_schema: str) -> None:
        """Raise SchemaRefused for text that is not a schema, or that the vocabulary cannot spell."""
        import xgrammar

        missing = sorted(one for one in NEEDED.union(json_schema) if not _is_spelled(one, self._spelled))
        if missing:
            shown = ", ".join(repr(one) for one in missing[:5])
            raise SchemaRefused(f"this model's vocabulary cannot spell it: {shown} missing ({len(missing)} characters)")
        try:
            xgrammar.Grammar.from_json_schema(json_schema, **ONE_SPELLING)
        except RuntimeError as error:  # all that the library raises
            reason = re.sub(r"^\[[^]]*\] \S+ ", "", str(error))  # a time and a line of its source
            raise SchemaRefused(f"not a schema that answers can be held to: {reason[:300]}") from error


def byte_vocabulary(num_tokens: int) -> TokenSpellings:
    """The first 256 tokens are the bytes; further ones have no text."""
    return TokenSpellings([bytes([token]) if token < 256 else b"" for token in range(num_tokens)])


def folder_vocabulary(folder: str, num_tokens: int) -> TokenSpellings:
    """The vocabulary of a model folder. num_tokens: of the model, which may have more than its tokenizer."""
    import xgrammar

    tokenizer = load_tokenizer(folder)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.wrapped, vocab_size=num_tokens)
    return TokenSpellings(info.decoded_vocab, frozenset(token for token in tokenizer.special_ids if token < num_tokens))


def make_compiler(vocabulary: TokenSpellings) -> Callable[[str], Any]:
    """The function that makes a schema's grammar. It raises RuntimeError for text that is not a schema."""
    import xgrammar

    spellings = list(vocabulary.spellings)
    info = xgrammar.TokenizerInfo(spellings, vocab_size=len(spellings), stop_token_ids=[])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return lambda json_schema: compiler.compile_json_schema(json_schema, **ONE_SPELLING)


def _is_spelled(character: str, spelled: frozenset[bytes]) -> bool:
    encoded = character.encode()
    return encoded in spelled or all(bytes([one]) in spelled for one in encoded)
