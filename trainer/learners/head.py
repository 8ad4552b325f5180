"""From hidden states to log π of the sampled tokens: the head of a language model, computed only where it is read.

Guarantees: sums over the width of the model and over the vocabulary are float32; of the logits no more are held at once than
allowed, and of a head in half precision neither a float32 copy nor a float32 gradient. In the backward of such a head the
slopes of the logits are rounded to its precision before they are multiplied. Float32 heads compute the model's own linear
layer, to the same bits.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CPU_SLICE = 1024  # tokens of the vocabulary: logits, slopes and weights of a slice stay in a core's cache
ARRAYS = 3  # as large as a slice's logits, held while its gradient is computed


class Head:
    """The output layer of a model. softcap: of the logits, 0 for none (Gemma). max_logits: held at once.

    total: a float32 sum [V, D] that takes the weight's gradient in half precision; None: a backward returns it.
    """

    def __init__(self, layer: Any, *, softcap: float, max_logits: int) -> None:
        self._layer = layer
        self.softcap = softcap
        self._max_logits = max_logits
        self.total: Callable[[], torch.Tensor] | None = None
        self._layer.forward = self._forward  # called as a module, since hooks of that call gather its weights

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
        if self.softcap:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
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
            size = self._max_logits // (ARRAYS * max(1, len(hidden)))
            size = max(1, min(size, self.num_tokens if hidden.is_cuda else CPU_SLICE))
            return LinearLogprobs.apply(hidden, weight_VD, bias_V, target_N, temperature_N, self, size)  # type: ignore[no-untyped-call]
        if weight_VD.dtype != torch.float32:
            return product(hidden.flatten(0, -2), weight_VD, bias_V).reshape(*hidden.shape[:-1], -1)
        return torch.nn.functional.linear(hidden.float(), weight_VD, bias_V)


class LinearLogprobs(torch.autograd.Function):
    """log π of targets and entropies of softmax(cap(hidden · weightᵀ + bias) / temperature), both [N] float32, in slices of the
    vocabulary whose logits the backward computes again.

    An online softmax computes the sums (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3). For logits z, their largest m,
    S = Σ exp(z - m) and T = Σ exp(z - m) (z - m): log p_y = z_y - m - log S and H = log S - T / S.
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
        head: Head,
        size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies. head: its soft cap and `total` count. size: of a slice of the vocabulary."""
        chosen_N, sum_N, moment_N = torch.zeros((3, len(hidden_ND)), dtype=torch.float32, device=hidden_ND.device)
        largest_N = torch.full_like(sum_N, torch.finfo(torch.float32).min)
        for part in _slices(len(weight_VD), size):
            logit_NS = _scaled(hidden_ND, weight_VD, bias_V, part, temperature_N, head.softcap)
            at_N1, is_here_N1 = _find(target_N, part)
            chosen_N += torch.where(is_here_N1, logit_NS.gather(1, at_N1), 0.0).squeeze(1)
            shift_N = largest_N - (largest_N := torch.maximum(largest_N, logit_NS.amax(-1)))
            logit_NS.sub_(largest_N[:, None])
            share_NS = logit_NS.exp()
            moment_N = shift_N.exp() * (moment_N + sum_N * shift_N)
            sum_N = shift_N.exp() * sum_N + share_NS.sum(-1)
            moment_N += share_NS.mul_(logit_NS).sum(-1)
        log_sum_N = sum_N.log()
        entropy_N, total_N = log_sum_N - moment_N / sum_N, largest_N + log_sum_N
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N, total_N)
        ctx.head, ctx.size = head, size
        return chosen_N - total_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of hidden states, weight and bias; each is summed in float32 and, where it is returned, rounded once."""
        hidden_ND, weight_VD, bias_V, target_N, temperature_N, entropy_N, total_N = ctx.saved_tensors
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros_like(hidden_ND, dtype=torch.float32) if to_hidden else None
        weight_grad = None
        if to_weight:
            weight_grad = torch.zeros_like(weight_VD) if ctx.head.total is None else ctx.head.total()
        bias_grad = torch.empty_like(bias_V) if to_bias else None
        for part in _slices(len(weight_VD), ctx.size):
            logit_NS = _scaled(hidden_ND, weight_VD, bias_V, part, temperature_N, ctx.head.softcap)
            slope_NS = _slopes(logit_NS, total_N, entropy_N, *_find(target_N, part), *gradients)
            slope_NS /= temperature_N[:, None]
            if ctx.head.softcap:
                slope_NS *= 1 - (logit_NS * temperature_N[:, None] / ctx.head.softcap).square()
            if hidden_grad is not None:
                hidden_grad += _matmul(slope_NS, weight_VD[part])
            if weight_grad is not None:
                weight_grad[part] += _matmul(slope_NS.T, hidden_ND)
            if bias_grad is not None:
                bias_grad[part] = slope_NS.sum(0)
        return (
            None if hidden_grad is None else hidden_grad.to(hidden_ND.dtype),
            weight_grad if ctx.head.total is None else None, bias_grad,
            None, None, None, None,
        )  # fmt: skip


def product(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None) -> torch.Tensor:
    """hidden · weightᵀ + bias with sums in float32, [N, V] float32."""
    if weight_VD.is_cuda:
        found = _matmul(hidden_ND, weight_VD.T)
    else:
        found = torch.empty((len(hidden_ND), len(weight_VD)), dtype=torch.float32)
        for part in _slices(len(weight_VD), CPU_SLICE):
            found[:, part] = _matmul(hidden_ND, weight_VD[part].T)
    return found if bias_V is None else found.add_(bias_V)


def _scaled(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    part: slice,
    temperature_N: torch.Tensor,
    softcap: float,
) -> torch.Tensor:
    """A slice of the logits that the softmax is taken of, [N, S]."""
    logit_NS = _matmul(hidden_ND, weight_VD[part].T)
    if bias_V is not None:
        logit_NS.add_(bias_V[part])
    if softcap:
        logit_NS.div_(softcap).tanh_().mul_(softcap)
    return logit_NS.div_(temperature_N[:, None])


def _slopes(
    logit_NS: torch.Tensor,
    total_N: torch.Tensor,
    entropy_N: torch.Tensor,
    at_N1: torch.Tensor,
    is_here_N1: torch.Tensor,
    logprob_N: torch.Tensor,
    spread_N: torch.Tensor,
) -> torch.Tensor:
    """The gradient by a slice of the logits, of those by the logprobs and the entropies."""
    slope_NS = logit_NS - total_N[:, None]
    share_NS = slope_NS.exp()
    slope_NS.add_(entropy_N[:, None]).mul_(spread_N[:, None]).add_(logprob_N[:, None]).mul_(share_NS).neg_()
    return slope_NS.scatter_add_(1, at_N1, torch.where(is_here_N1, logprob_N[:, None], 0.0))


def _find(target_N: torch.Tensor, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of each target in a slice, clamped to it, and True where the slice has the target; both [N, 1]."""
    at_N1 = target_N[:, None] - part.start
    return at_N1.clamp(0, part.stop - part.start - 1), (at_N1 >= 0) & (at_N1 < part.stop - part.start)


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


def _slices(num_tokens: int, size: int) -> Iterator[slice]:
    """Slices of a vocabulary."""
    return (slice(at, min(at + size, num_tokens)) for at in range(0, num_tokens, size))
