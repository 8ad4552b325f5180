"""Find how the rows of a model are read, once when it is opened, by comparing with the model's own logits.

Guarantees: if packed rows give other logprobs than each sequence alone, the model is read sequence by sequence; if the
logprobs still differ from the model's own, ConfigError names the model. The tolerance is a share of the difference that a
leak between two sequences makes, so that no deep model is refused because bfloat16 rounds, and a leak is found in small
models.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from schemas.errors import ConfigError
from trainer.batch.batch import Microbatch
from trainer.learners.attention import DENSE_TOKENS, Abilities, Path, chain, reading_path, take_tree

logger = logging.getLogger(__name__)

SHARED = (5, 6, 7, 8, 9, 10)
TAILS = ((11, 12, 13, 5, 7, 9, 11), (8, 5, 12, 6, 10, 7, 13))
# How far two readings of one sequence may differ: share of the difference that a leak makes, and least distance.
TOLERANCES = {torch.float32: (0.01, 1e-5)}
HALF = (0.25, 0.02)
# Errors of a forward that does not take such a mask.
UNABLE = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)


class Sample(NamedTuple):
    """Two sequences with a common beginning.

    packed: both in one row. branches_2T: int64, each for itself.
    """

    packed: Microbatch
    branches_2T: torch.Tensor


def find_abilities(
    module: Any, folder: str, num_tokens: int, logprobs: Callable[[Microbatch, Path | None], torch.Tensor]
) -> Abilities:
    """Find the paths that read a model's rows. logprobs: of the sampled tokens, by a path; None: as if the row were one text.

    num_tokens: of the vocabulary. The module takes our attention where that gives its own logprobs. Raises ConfigError.
    """
    apart = functools.partial(_distance, dtype=module.dtype)
    with torch.no_grad():
        config = module.config.get_text_config()
        sample = _sample(num_tokens, module.device)
        plain = _plain(module, sample)
        why = mixes_neighbours(module, config)
        unpacked = logprobs(sample.packed, "unpacked")
        ratio, least = TOLERANCES.get(module.dtype, HALF)
        leak = apart(logprobs(sample.packed, None), unpacked)
        window = sliding_window(config)
        own = module.config._attn_implementation
        num_T = sample.packed.tokens_BT.shape[1]

        def close(path: Path) -> bool:
            try:
                return apart(logprobs(sample.packed, path), plain) <= max(least, ratio * leak)
            except UNABLE as error:
                logger.info("model=%s does not take path=%s: %s", folder, path, str(error).partition("\n")[0])
                return False

        # A model that is not SDPA's takes other masks; shorter windows than the sample are in no dense mask.
        dense = not why and own == "sdpa" and not 0 < window < num_T and close("dense")
        long = reading_path(module.device.type, DENSE_TOKENS + 1, Abilities(dense=False, tree=True))
        tree = not why and take_tree(module) and close(long) and _tells_windows(module, window)
        if not tree and module.config._attn_implementation != own:
            module.set_attn_implementation(own)
        if not (dense or tree):
            if not (distance := apart(unpacked, plain)) <= max(least, ratio * leak):
                raise ConfigError(
                    f"policy.model: {folder} ({module.config.model_type}) gives other logprobs here than its own (off by "
                    f"{distance:.3g}): its head is not supported"
                )
            why = why or "its attention takes no mask of packed sequences"
            logger.warning("model=%s is read sequence by sequence, which is slower: %s", folder, why)
        return Abilities(dense=dense, tree=tree, window=window)


def reading_words(device: str, family: Abilities) -> str:
    """The paths of rows, for the journal."""
    bound = min(DENSE_TOKENS, family.window or DENSE_TOKENS)
    short, long = (reading_path(device, num_T, family) for num_T in (bound, DENSE_TOKENS + 1))
    alone = " or causal" if long in ("blocks", "flex") else ""  # see `row_path`
    return short if short == long else f"{short} to {bound} tokens, then {long}{alone}"


def sliding_window(config: Any) -> int:
    """Tokens that the layers with the shortest window see; 0 for no bound."""
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    return int(getattr(config, "sliding_window", 0) or 0) if "sliding_attention" in kinds else 0


def mixes_neighbours(module: Any, config: Any) -> str:
    """Why no mask of positions keeps two sequences of a row apart, "" where one does."""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of {sorted(kinds)[0]}"
    mixing = [name for name, layer in module.named_modules() if isinstance(layer, torch.nn.Conv1d)]
    return f"{mixing[0]} is a convolution over tokens" if mixing else ""


def _tells_windows(module: Any, window: int) -> bool:
    """True if layers tell our attention exactly the window that their model's own masks have."""
    ids_BT = torch.tensor([SHARED], device=module.device) % module.get_input_embeddings().num_embeddings
    tree = chain(ids_BT, "blocks")
    getattr(module, module.base_model_prefix)(input_ids=ids_BT, use_cache=False, **tree.inputs())
    return tree.windows - {0} == ({window} if window else set())


def _plain(module: Any, sample: Sample) -> torch.Tensor:
    """The model's own log-probabilities of the sample's sampled tokens, [N]."""
    logits_BTV = module(input_ids=sample.branches_2T, use_cache=False).logits[:, len(SHARED) - 1 :].float()
    logprob_NV = torch.log_softmax(logits_BTV, -1).flatten(0, 1)
    target_N = torch.from_numpy(sample.packed.target_N).to(logprob_NV.device)
    return logprob_NV.gather(1, target_N[:, None]).squeeze(1)


def _distance(here: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> float:
    """Distance of two readings of the sample. In half precision rounding sends some tokens to other experts: the
    median says nothing of these few. It is the second sequence's, which is the one that a leak reaches.
    """
    away_N = (here - other).abs()
    return float(away_N.max() if dtype == torch.float32 else away_N[len(away_N) // 2 :].median())


def _sample(num_tokens: int, device: torch.device) -> Sample:
    shared, tails = [token % num_tokens for token in SHARED], [[token % num_tokens for token in tail] for tail in TAILS]
    begin, length = len(shared), len(tails[0])
    stop = begin + 2 * (length - 1)  # the last token of a sequence is no input
    second = begin + length - 1
    reach = [stop] * begin + [second] * (length - 1) + [stop] * (length - 1)
    predecessors = [[begin - 1, *range(at, at + length - 1)] for at in (begin, second)]
    num_N = 2 * length
    packed = Microbatch(
        tokens_BT=np.array([shared + tails[0][:-1] + tails[1][:-1]]),
        positions_BT=np.array([[*range(second), *range(begin, second)]]),
        reach_BT=np.array([reach]),
        predecessor_N=np.array(predecessors).reshape(-1),
        target_N=np.array(tails).reshape(-1),
        temperature_N=np.ones(num_N, np.float32),
        **{name: np.zeros(num_N, np.float32) for name in ("behaviour_N", "advantage_N", "weight_N")},
        **{name: np.zeros(num_N, np.float32) for name in ("teacher_N", "reward_N")},
        **{name: np.zeros(num_N, np.int64) for name in ("version_N", "ratio_N", "exact_N", "lane_N", "sequence_N")},
        **{name: np.full(num_N, -1) for name in ("pair_N", "bootstrap_N")},
    )
    return Sample(packed, torch.tensor([shared + tail[:-1] for tail in tails], device=device))
