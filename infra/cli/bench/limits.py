"""What bounds a benchmark that misses a target, as far as it was found, by its name."""

LIMITS: dict[str, str] = {
    "codec": (
        "a block has three frames of zstd, so that a stage edits headers without touching the rest. Of a short block these"
        " take as long as the rival's whole round trip; of 16 answers the checks of each member's header, spans and"
        " log-probabilities do, which the rival does not make."
    ),
    "gateway-peers": (
        "the template and the tokenizer alone take more than a bare server's whole answer; see [the"
        " gateway](../explanation/measured.md#the-gateway)."
    ),
    "overlap": (
        "with one wave the longest of 64 answers outlasts the two steps that the bound on staleness allows; a larger bound or"
        " shorter answers would fill the gap."
    ),
    "train": "see [training beside TRL](../explanation/measured.md#training-beside-trl).",
    "weights": (
        "folding many versions reads and writes what moved at scattered places, 0.06 to 0.09 s a GB and version; a slice of one"
        " tensor, the freeing of the old version and the lock of the one file are one thread's. Wall figures need quiet cores."
    ),
}
