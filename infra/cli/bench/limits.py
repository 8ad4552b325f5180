"""What bounds a benchmark that misses a target, as far as it was found, by its name."""

LIMITS: dict[str, str] = {
    "codec": (
        "a block has three frames of zstd, so that a stage edits headers without touching the rest. Of a short block these"
        " take as long as the rival's whole round trip; of 16 answers the checks of each member's header, spans and"
        " log-probabilities do, which the rival does not make."
    ),
    "console-load": (
        "the mean of six pairs of minutes on two cores; its error falls with the root of their number: 0.03 takes about twenty."
    ),
    "feedback": (
        "a join runs the whole chain of collect on its group and publishes two records: about 1,100 calls of Python, of which"
        " none takes more than a tenth."
    ),
    "gateway-peers": (
        "the template and the tokenizer alone take more than a bare server's whole answer; see [the"
        " gateway](../explanation/measured.md#the-gateway)."
    ),
    "growth": (
        "what a checkpoint remembers of groups is a table by name. At a million an entry costs up to twice what it costs at"
        " 100,000; the likely cause is the processor's cache, in which smaller tables lie."
    ),
    "overlap": (
        "with one wave the longest of 64 answers outlasts the two steps that the bound on staleness allows; a larger bound or"
        " shorter answers would fill the gap."
    ),
    "start": (
        "cold, Python compiles torch and vLLM anew, in each of their processes; `make install` does that once. Both cores are"
        " busy until vLLM's own process imports what its front has imported before it, one after the other."
    ),
    "state": (
        "what the orders beside the upload take is counted too, and it differs: 0.59 and 1.04 GiB above the shards in two runs"
        " before this one."
    ),
    "train": (
        "with a model of 0.9 million parameters a step costs what moves its answers: both cores are busy, of which the engine"
        " takes a third and the trainer a quarter; see [training beside TRL](../explanation/measured.md#training-beside-trl)."
    ),
    "transport": (
        "the peers pickle arrays and keep them in memory. Here each answer is checked, compressed, written to a broker's disk,"
        " read and checked again: what a log is for."
    ),
    "weights": (
        "folding many versions reads and writes what moved at scattered places, 0.06 to 0.09 s a GB and version; a slice of one"
        " tensor, the freeing of the old version and the lock of the one file are one thread's. Wall figures need quiet cores."
    ),
}
