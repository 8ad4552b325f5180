"""Rows of a data set of Hugging Face by its name, through the library `datasets`: from its local cache where that has them.

Guarantee: an unavailable data set (no such data set, no network, no such split) is one ConfigError that names it; the library
is never allowed to run code of a data set.
"""

import logging
from collections.abc import Iterator
from typing import Any

from schemas.errors import ConfigError


class HubRows:
    """The rows of one split. name: as "openai/gsm8k", or "openai/gsm8k:main" with a configuration."""

    def __init__(self, name: str, split: str) -> None:
        """Fetch it, or open the cache. Blocks. Raises ConfigError."""
        self.name = name
        try:
            import datasets
        except ImportError as error:
            raise ConfigError('--dataset: needs the package datasets: pip install "datasets>=4"') from error
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries without a network, a line each
        datasets.disable_progress_bars()
        path, _, configuration = name.partition(":")
        try:
            self._rows: Any = datasets.load_dataset(path, configuration or None, split=split or "train")
        except Exception as error:  # of HTTP clients, of file systems, of its own
            said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(
                f"--dataset {name}: split {split or 'train'!r} cannot be had ({said}); expected a data set of the hub and a "
                "network, or one in the local cache; a configuration is named behind a colon, as openai/gsm8k:main"
            ) from error

    def __len__(self) -> int:
        return len(self._rows)

    def cells(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row with its place."""
        for index, row in enumerate(self._rows):
            yield f"{self.name}:{index + 1}", row
