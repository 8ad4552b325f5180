"""From hidden states to log π of the sampled tokens: the head of a language model, computed only where it is read.

Guarantees: sums over the width of the model and over the vocabulary are float32; of the logits no more are held at once than
allowed, and of a head in half precision no float32 copy: its gradient alone is float32 until a microbatch is done. In the
backward of such a head the slopes of the logits are rounded to its precision before they are multiplied. Float32 heads compute
by the model's own linear layer, bit for bit what they always did.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

SLICE_TOKENS = 8192  # of the vocabulary, turned to float32 at once on the CPU
ARRAYS = 3  # as large as the logits, held while the gradient of a chunk is computed


class Head:
    """The output layer of a model. softcap: of the logits, 0 for none (Gemma). max_logits: held at once."""

    def __init__(self, layer: Any, *, softcap: float, max_logits: int) -> None:
        self._layer = layer
        self._softcap = softcap
        self._max_logits = max_logits
        self._layer.forward = self._forward  # called as the module it is: what gathers its weights, hooks there

    @property
    def num_tokens(self) -> int:
        return int(self._layer.out_features)

    def logprobs(self, hidden_ND: torch.Tensor, target_N: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
        """log π of the targets, [N] float32. temperature_N: or one for all of them."""
        if self._layer.weight.dtype != torch.float32:
            found: torch.Tensor = self._layer(hidden_ND, target_N, temperature_N.expand(len(target_N)))[0]
            return found
        return self._in_pieces(self._read, hidden_ND, target_N, temperature_N, arrays=1)

    def logprobs_and_entropy(
        self, hidden_ND: torch.Tensor, target_N: torch.Tensor, temperature_N: torch.Tensor
    ) -> torch.Tensor:
        """log π of the targets and the entropy of π where each was chosen, both with gradients, [2, N] float32."""
        if self._layer.weight.dtype != torch.float32:
            return torch.stack(self._layer(hidden_ND, target_N, temperature_N))
        return self._in_pieces(self._read_both, hidden_ND, target_N, temperature_N, arrays=3)

    @torch.no_grad()
    def most_likely(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """The most likely token of each state, [N]."""
        return torch.cat([self._layer(part).argmax(-1) for part in hidden_ND.chunk(self._num_pieces(len(hidden_ND)))])

    def _in_pieces(
        self,
        read: Callable[..., torch.Tensor],
        hidden_ND: torch.Tensor,
        target_N: torch.Tensor,
        temperature_N: torch.Tensor,
        *,
        arrays: int,
    ) -> torch.Tensor:
        """`read` of all tokens, [..., N]. arrays: as large as the logits, kept for its backward; where they are
        more than allowed, pieces of them are computed again there.
        """
        pieces = self._num_pieces(len(target_N) * arrays)
        if pieces == 1:
            return read(hidden_ND, target_N, temperature_N)
        temperature_N = temperature_N.expand(len(target_N))
        parts = zip(hidden_ND.chunk(pieces), target_N.chunk(pieces), temperature_N.chunk(pieces), strict=True)
        return torch.cat([checkpoint(read, *part, use_reentrant=False) for part in parts], -1)

    def _num_pieces(self, num_tokens: int) -> int:
        return max(1, -(-num_tokens * self.num_tokens // self._max_logits))

    def _logits(self, hidden_ND: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
        logits_NV: torch.Tensor = self._layer(hidden_ND)
        if self._softcap:
            logits_NV = self._softcap * torch.tanh(logits_NV / self._softcap)
        if not temperature_N.is_cuda and bool((temperature_N == 1).all()):
            return logits_NV  # as the division would, to the bit; a GPU would have to be waited for
        scaled: torch.Tensor = logits_NV / temperature_N[:, None]
        return scaled

    def _read(self, hidden_ND: torch.Tensor, target_N: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
        logits_NV = self._logits(hidden_ND, temperature_N)
        return torch.log_softmax(logits_NV, -1).gather(1, target_N[:, None]).squeeze(1)

    def _read_both(self, hidden_ND: torch.Tensor, target_N: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
        logprob_NV = torch.log_softmax(self._logits(hidden_ND, temperature_N), -1)
        entropy_N = -(logprob_NV.exp() * logprob_NV).sum(-1)
        return torch.stack((logprob_NV.gather(1, target_N[:, None]).squeeze(1), entropy_N))

    def _forward(
        self, hidden: torch.Tensor, target_N: torch.Tensor | None = None, temperature_N: torch.Tensor | None = None
    ) -> Any:
        """The layer's logits in float32; or, of targets, their logprobs and the entropies."""
        weight_VD, bias_V = self._layer.weight, self._layer.bias
        if target_N is not None:
            chunk = max(1, self._max_logits // (ARRAYS * self.num_tokens))
            return LinearLogprobs.apply(hidden, weight_VD, bias_V, target_N, temperature_N, self._softcap, chunk)  # type: ignore[no-untyped-call]
        if weight_VD.dtype != torch.float32:
            return product(hidden.flatten(0, -2), weight_VD, bias_V).reshape(*hidden.shape[:-1], -1)
        return torch.nn.functional.linear(hidden.float(), weight_VD, bias_V)


class LinearLogprobs(torch.autograd.Function):
    """log π of targets and entropies of softmax(cap(hidden · weightᵀ + bias) / temperature), both [N] float32, in chunks of
    tokens whose logits the backward computes again.

    With p = softmax(z): ∂log p_y/∂z = onehot(y) - p and ∂H/∂z = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_N: torch.Tensor,
        temperature_N: torch.Tensor,
        softcap: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies. chunk: tokens."""
        found = []
        for at in range(0, len(hidden_ND), chunk):
            mine = slice(at, at + chunk)
            logit_CV = _scaled(hidden_ND[mine], weight_VD, bias_V, temperature_N[mine], softcap)
            total_C = torch.logsumexp(logit_CV, -1)
            logprob_C = logit_CV.gather(1, target_N[mine, None]).squeeze(1) - total_C
            logit_CV.sub_(total_C[:, None])  # log p: an entropy made of the logits would lose what they have in common
            entropy_C = -torch.exp(logit_CV).mul_(logit_CV).sum(-1)
            found.append(torch.stack((logprob_C, entropy_C, total_C)))
        logprob_N, entropy_N, total_N = torch.cat(found, 1) if found else hidden_ND.new_zeros((3, 0)).float()
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N, total_N)
        ctx.softcap, ctx.chunk = softcap, chunk
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of hidden states, weight and bias; the latter two are summed in float32."""
        hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N, total_N = ctx.saved_tensors
        logprob_N, spread_N = gradients
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.empty_like(hidden_ND) if to_hidden else None
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if to_weight else None
        bias_grad = torch.zeros_like(bias_V, dtype=torch.float32) if to_bias else None
        for at in range(0, len(hidden_ND), ctx.chunk):
            mine = slice(at, at + ctx.chunk)
            logit_CV = _scaled(hidden_ND[mine], weight_VD, bias_V, temperature_N[mine], ctx.softcap)
            slope_CV = _slopes(
                logit_CV, target_N[mine], total_N[mine, None], entropy_N[mine, None], logprob_N[mine], spread_N[mine]
            )
            slope_CV /= temperature_N[mine, None]
            if ctx.softcap:
                slope_CV *= 1 - (logit_CV * temperature_N[mine, None] / ctx.softcap).square()
            if hidden_grad is not None:
                hidden_grad[mine] = _back(slope_CV, weight_VD)
            if weight_grad is not None:
                _add_outer(weight_grad, slope_CV, hidden_ND[mine])
            if bias_grad is not None:
                bias_grad += slope_CV.sum(0)
        return (
            hidden_grad,
            None if weight_grad is None else weight_grad.to(weight_VD.dtype),
            None if bias_grad is None else bias_grad.to(bias_V.dtype),
            None, None, None, None,
        )  # fmt: skip


def product(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    """hidden · weightᵀ + bias with sums in float32, [N, V] float32."""
    parts = _slices(weight_VD)
    if len(parts) == 1:
        found = _matmul(hidden_ND, weight_VD.T)
    else:
        found = torch.empty((len(hidden_ND), len(weight_VD)), dtype=torch.float32, device=hidden_ND.device)
        for part in parts:
            found[:, part] = _matmul(hidden_ND, weight_VD[part].T)
    return found if bias_V is None else found.add_(bias_V)


def _scaled(
    hidden_CD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    temperature_C: torch.Tensor,
    softcap: float,
) -> torch.Tensor:
    """The logits that the softmax is taken of, [C, V]."""
    logit_CV = product(hidden_CD, weight_VD, bias_V)
    if softcap:
        logit_CV.div_(softcap).tanh_().mul_(softcap)
    return logit_CV.div_(temperature_C[:, None])


def _slopes(
    logit_CV: torch.Tensor,
    target_C: torch.Tensor,
    total_C1: torch.Tensor,
    entropy_C1: torch.Tensor,
    logprob_C: torch.Tensor,
    spread_C: torch.Tensor,
) -> torch.Tensor:
    """The gradient by the logits, of those by the logprobs and the entropies."""
    slope_CV = logit_CV - total_C1
    share_CV = slope_CV.exp()
    slope_CV.add_(entropy_C1).mul_(spread_C[:, None]).add_(logprob_C[:, None]).mul_(share_CV).neg_()
    return slope_CV.scatter_add_(1, target_C[:, None], logprob_C[:, None])


def _back(slope_CV: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    found = torch.zeros((len(slope_CV), weight_VD.shape[1]), dtype=torch.float32, device=slope_CV.device)
    for part in _slices(weight_VD):
        found += _matmul(slope_CV[:, part], weight_VD[part])
    return found


def _add_outer(weight_grad: torch.Tensor, slope_CV: torch.Tensor, hidden_CD: torch.Tensor) -> None:
    for part in _slices(weight_grad):
        weight_grad[part] += _matmul(slope_CV[:, part].T, hidden_CD)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of two matrices with sums in float32; the left one is rounded to the right one's dtype."""
    if left.is_cuda and right.dtype != torch.float32:
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if right.dtype == torch.bfloat16:  # by the CPU's bfloat16 units where it has them: a third of the time
        matmul.fp32_precision = "bf16"
    try:
        return left.float() @ right.float()
    finally:
        matmul.fp32_precision = before


def _slices(weight_VD: torch.Tensor) -> list[slice]:
    """Slices of the vocabulary: all of it where nothing is turned to float32."""
    size = len(weight_VD) if weight_VD.is_cuda else SLICE_TOKENS
    return [slice(at, at + size) for at in range(0, len(weight_VD), size)]
