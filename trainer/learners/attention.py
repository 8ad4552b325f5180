"""Attention over packed trees without a mask of T × T: position i sees j exactly where j <= i < reach[j].

Guarantees: memory grows with the length of a row, not with its square; a layer with a sliding window of w sees the last w
tokens of a token's own sequence, not of the row; sinks and soft caps count as in the model's own attention. Which path
computes a row is decided by `reading_path` and `row_path` alone.
"""

from functools import partial
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

TREE = "headrace_tree"  # the name transformers knows this attention by
DENSE_TOKENS = 2048  # rows up to this length keep a dense mask, and with it the bits they always had
BLOCK_TOKENS = 256  # queries whose scores are held at once on the CPU
FLEX_TOKENS = 128  # side of a block of FlexAttention's mask
FLEX_KERNELS = 64  # that torch makes for it; beyond its own 8 it goes on with scores of T × T, and warns of it

Path = Literal["dense", "causal", "blocks", "flex", "unpacked"]


class Abilities(msgspec.Struct, frozen=True):
    """The ways to read a model's rows, found when it was opened. dense: it reads a packed row under a mask of T × T. tree: its
    layers take the attention of this module. window: the shortest sliding window of its layers in tokens, 0 for none.
    """

    dense: bool
    tree: bool
    window: int = 0


def reading_path(device: str, num_T: int, family: Abilities) -> Path:
    """The path for rows of `num_T` tokens. device: "cpu", "cuda".

    Short rows: a dense mask. Longer rows: FlexAttention on CUDA, else blocks of queries, since FlexAttention has no backward
    on the CPU. A family that supports neither: each sequence in a row of its own.
    """
    within = not family.window or num_T <= family.window
    if family.dense and within and num_T <= DENSE_TOKENS:
        return "dense"
    if family.tree:
        return "flex" if device == "cuda" else "blocks"
    return "dense" if family.dense and within else "unpacked"


def row_path(reach_BT: np.ndarray, path: Path, family: Abilities) -> Path:
    """The path for these rows: "causal", without a mask, if each row is one sequence and the family allows it, else `path`.
    Up to DENSE_TOKENS it gives the bits of "dense".
    """
    num_T = reach_BT.shape[1]
    can = family.tree and family.dense and (path == "dense" or (path in ("blocks", "flex") and num_T > DENSE_TOKENS))
    return "causal" if can and (reach_BT == num_T).all() else path


class RowTrees:
    """The trees of a microbatch's rows. reach_BT, position_BT int64: see `Microbatch`. windows: windows of the layers that have
    asked, 0 for a layer without one.
    """

    def __init__(self, reach_BT: torch.Tensor, position_BT: torch.Tensor, path: Path) -> None:
        self.reach_BT = reach_BT
        self.position_BT = position_BT
        self.path = path
        self.windows: set[int] = set()
        self._masks: dict[int, Any] = {}

    def block_mask(self, window: int) -> Any:
        """FlexAttention's mask, made once for all layers with this window (0 for none)."""
        if window not in self._masks:
            self._masks[window] = block_mask(self.reach_BT, self.position_BT, window)
        return self._masks[window]

    def inputs(self) -> dict[str, Any]:
        """Inputs of the model's forward besides its tokens."""
        # A mask of four dimensions goes through transformers as it is; nothing reads it.
        return {"tree": self, "attention_mask": self.reach_BT.new_zeros((1, 1, 1, 1)), "position_ids": self.position_BT}


def chain(ids_BT: torch.Tensor, path: Path) -> RowTrees:
    """The tree of rows that hold one sequence each."""
    num_B, num_T = ids_BT.shape
    index_BT = torch.arange(num_T, device=ids_BT.device).expand(num_B, num_T)
    return RowTrees(torch.full_like(ids_BT, num_T), index_BT, path)


def dense_mask(reach_BT: torch.Tensor) -> torch.Tensor:
    """True where position i sees j, [B, 1, T, T] bool."""
    index_T = torch.arange(reach_BT.shape[1], device=reach_BT.device)
    causal_TT = index_T[:, None] >= index_T[None, :]
    mask_BTT = causal_TT & (index_T[None, :, None] < reach_BT[:, None, :])
    return mask_BTT[:, None]


def take_tree(module: Any) -> bool:
    """Let a transformers model call `tree_attention`; calls without a tree compute the same as before, if that was SDPA.

    True if its layers do call it.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(TREE, tree_attention)
    AttentionMaskInterface.register(TREE, sdpa_mask)
    module.set_attn_implementation(TREE)
    return bool(module.config.get_text_config()._attn_implementation == TREE)


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree: RowTrees | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [B, H, T, D], key and value [B, heads of keys, T, D]; gives [B, T, H, D].

    settings: of the layer (scaling, sliding_window, softcap, s_aux: a logit of each head that takes attention away).
    """
    if tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        # On a CPU the backward calls small products, for which bfloat16 takes longer.
        if query.dtype == torch.bfloat16 and not query.is_cuda:
            wide = (query.float(), key.float(), value.float())
            return sdpa_attention_forward(module, *wide, attention_mask, **settings)[0].to(query.dtype), None
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
        return found
    sinks_H = settings.pop("s_aux", None)
    return _attend_tree(module, tree, settings, query, key, value, sinks_H), None


def _attend_tree(
    module: torch.nn.Module,
    tree: RowTrees,
    settings: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """[B, T, H, D], of all tokens of the rows."""
    window = int(settings.get("sliding_window") or 0)
    tree.windows.add(window)
    if tree.path == "causal" and sinks_H is None and _is_whole(query, key, value, settings):
        return _causal(query, key, value, settings.get("scaling")).transpose(1, 2).contiguous()
    if tree.path == "flex" or (query.is_cuda and query.shape[2] > DENSE_TOKENS):
        from transformers.integrations.flex_attention import flex_attention_forward as flex

        with torch._dynamo.config.patch(recompile_limit=FLEX_KERNELS, fail_on_recompile_limit_hit=True):
            found: torch.Tensor = flex(module, query, key, value, tree.block_mask(window), s_aux=sinks_H, **settings)[0]
        return found
    return _in_blocks(tree, window, settings, query, key, value, sinks_H).transpose(1, 2).contiguous()


def _is_whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: dict[str, Any]) -> bool:
    """True if SDPA computes attention to all before; beyond DENSE_TOKENS without a T × T of anything."""
    num_T, window = query.shape[2], settings.get("sliding_window") or 0
    if settings.get("softcap") is not None or 0 < window < num_T:
        return False
    if num_T <= DENSE_TOKENS:
        return True
    return bool(torch._fused_sdp_choice(query[:, :1], key[:, :1], value[:, :1], is_causal=True))  # 0: none


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Attention of each token to all before it. Keys and values are repeated as transformers does it, to its bits."""
    from transformers.integrations.sdpa_attention import repeat_kv

    keys, values = (repeat_kv(tensor, query.shape[1] // tensor.shape[1]) for tensor in (key, value))
    attend = torch.nn.functional.scaled_dot_product_attention
    found: torch.Tensor = attend(query, keys, values, is_causal=True, scale=scale)
    return found


def _in_blocks(
    tree: RowTrees,
    window: int,
    settings: dict[str, Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """[B, H, T, D]: a block of queries after the other, with the keys that some of them see. The backward computes it again."""

    def block(start: int, stop: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        seen_K, mask = _seen(tree, start, stop, window)
        return _attend(query[:, :, start:stop], key[:, :, seen_K], value[:, :, seen_K], sinks_H, mask, settings)

    starts = range(0, query.shape[2], BLOCK_TOKENS)
    again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(at, min(at + BLOCK_TOKENS, query.shape[2]), query, key, value) for at in starts], 2)


def _repeated(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values once for each head of queries."""
    groups = query.shape[1] // key.shape[1]
    return (key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)) if groups > 1 else (key, value)


def _seen(tree: RowTrees, start: int, stop: int, window: int) -> tuple[Any, torch.Tensor]:
    """Keys that some of the queries from `start` to `stop` see, as an index, and which of them each sees, [B, 1, Q, K]."""
    index_Q = torch.arange(start, stop, device=tree.reach_BT.device)
    seen_K = (tree.reach_BT[:, :stop] > start).any(0).nonzero().squeeze(1)
    mask_BQK = (seen_K <= index_Q[:, None]) & (index_Q[:, None] < tree.reach_BT[:, None, seen_K])
    if window:
        away_BQK = tree.position_BT[:, start:stop, None] - tree.position_BT[:, None, seen_K]
        mask_BQK &= away_BQK < window
    return slice(0, stop) if len(seen_K) == stop else seen_K, mask_BQK[:, None]


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks_H: torch.Tensor | None,
    mask_B1QK: torch.Tensor,
    settings: dict[str, Any],
) -> torch.Tensor:
    key, value = _repeated(query, key, value)
    if settings.get("softcap") is not None or sinks_H is not None:
        return _capped(query, key, value, sinks_H, mask_B1QK, settings)
    found: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask_B1QK, scale=settings.get("scaling")
    )
    return found


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks_H: torch.Tensor | None,
    mask_B1QK: torch.Tensor,
    settings: dict[str, Any],
) -> torch.Tensor:
    """Attention with a soft cap or with sinks, its sums in float32."""
    scale = settings.get("scaling") or query.shape[-1] ** -0.5
    scores = query.float() @ key.float().transpose(2, 3) * scale
    if (cap := settings.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask_B1QK, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    share = torch.softmax(scores, -1)[..., : key.shape[2]]
    return (share.to(value.dtype) @ value).to(query.dtype)


def block_mask(reach_BT: torch.Tensor, position_BT: torch.Tensor, window: int) -> Any:
    """FlexAttention's mask of trees, from bounds of each block: memory of (T / 128)², no mask of T × T on the way."""
    from torch.nn.attention.flex_attention import BlockMask

    num_T = reach_BT.shape[1]
    num_blocks = -(-num_T // FLEX_TOKENS)
    least, most = (_of_blocks(reach_BT, num_blocks, how) for how in ("amin", "amax"))
    first, last = (_of_blocks(position_BT, num_blocks, how) for how in ("amin", "amax"))
    start_A = torch.arange(num_blocks, device=reach_BT.device) * FLEX_TOKENS
    end_A = (start_A + FLEX_TOKENS).clamp(max=num_T) - 1
    causal, below = start_A[:, None] >= start_A[None, :], start_A[:, None] > start_A[None, :]
    some = causal & (most[:, None, :] > start_A[None, :, None])
    every = below & (least[:, None, :] > end_A[None, :, None])
    if window:
        some &= first[:, :, None] - last[:, None, :] < window
        every &= last[:, :, None] - first[:, None, :] < window

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = (j <= i) & (i < reach_BT[b, j])
        return seen & (position_BT[b, i] - position_BT[b, j] < window) if window else seen

    return BlockMask.from_kv_blocks(
        *_listed(some & ~every), *_listed(every), BLOCK_SIZE=FLEX_TOKENS, mask_mod=sees, seq_lengths=(num_T, num_T)
    )


def _of_blocks(values_BT: torch.Tensor, num_blocks: int, how: str) -> torch.Tensor:
    """The least or largest value of each block of a row."""
    num_B, num_T = values_BT.shape
    padded = values_BT.new_zeros((num_B, num_blocks * FLEX_TOKENS))
    padded[:, :num_T] = values_BT
    padded[:, num_T:] = values_BT[:, -1:]
    found: torch.Tensor = getattr(padded.view(num_B, num_blocks, FLEX_TOKENS), how)(-1)
    return found


def _listed(chosen_BAK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number and indexes of the blocks of keys that each block of queries sees: these first."""
    order = torch.argsort(chosen_BAK.to(torch.int8), dim=-1, descending=True, stable=True)
    return chosen_BAK.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
