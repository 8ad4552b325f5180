"""The head: logprobs and entropies against float64, in chunks, without a float32 copy of its weights."""

import subprocess
import sys

import pytest
import torch

from tests.memory import PEAK_MB
from trainer.learners.head import Head, LinearLogprobs

N, D, V = 23, 16, 97


def given(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(N, D).to(dtype).requires_grad_(),
        "weight": torch.randn(V, D).to(dtype).requires_grad_(),
        "bias": torch.randn(V).to(dtype).requires_grad_(),
        "target": torch.randint(0, V, (N,)),
        "temperature": 0.5 + torch.rand(N),
    }


def exact(one: dict[str, torch.Tensor], softcap: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The same in float64 by torch's own functions: inputs, and [2, N]."""
    double = {name: one[name].detach().double().requires_grad_() for name in ("hidden", "weight", "bias")}
    logits = torch.nn.functional.linear(*double.values())
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = torch.log_softmax(logits / one["temperature"].double()[:, None], -1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return double, torch.stack((logprobs.gather(1, one["target"][:, None]).squeeze(1), entropy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [1, 7, N, 100])
def test_the_chunked_head_and_its_gradients_are_those_of_float64(dtype, softcap, chunk):
    one = given(dtype)
    found = LinearLogprobs.apply(*one.values(), softcap, chunk)
    double, expected = exact(one, softcap)
    assert all(each.dtype == torch.float32 for each in found)
    assert (torch.stack(found) - expected).abs().max() < 1e-5
    weight = torch.randn(2, N)
    (torch.stack(found) * weight).sum().backward()
    (expected * weight).sum().backward()
    # A gradient in bfloat16 is rounded once, whatever it was summed of.
    bound = 1e-5 if dtype == torch.float32 else 2**-8
    for name, value in double.items():
        away = (one[name].grad - value.grad).abs()
        assert (away <= bound * value.grad.abs() + 1e-5 * value.grad.abs().max()).all(), name


def head(dtype: torch.dtype, max_logits: int, softcap: float = 0.0) -> tuple[Head, torch.nn.Linear]:
    torch.manual_seed(0)
    layer = torch.nn.Linear(D, V).to(dtype)
    return Head(layer, softcap=softcap, max_logits=max_logits), layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_any_bound_on_the_logits_held_gives_one_result(dtype, softcap):
    one = given(dtype)
    results = []
    for max_logits in (2**26, 5 * V, 1):
        of, layer = head(dtype, max_logits, softcap)
        targets = (one["target"], one["temperature"])
        both = of.logprobs_and_entropy(one["hidden"], *targets)
        assert (both[0] - of.logprobs(one["hidden"], *targets)).abs().max() < 1e-5
        assert torch.equal(of.most_likely(one["hidden"]), layer(one["hidden"]).argmax(-1))
        both.sum().backward()
        results.append((both, layer.weight.grad))
    for both, gradient in results[1:]:
        assert (both - results[0][0]).abs().max() < 1e-5
        assert (gradient.float() - results[0][1].float()).abs().max() < 0.02 * results[0][1].float().abs().max()


@pytest.mark.parametrize("temperature", ["each its own", 1.0])
def test_a_float32_head_computes_bit_for_bit_what_torchs_own_functions_do(temperature):
    one = given()
    if temperature == 1.0:
        one["temperature"] = torch.ones(N)
    of, layer = head(torch.float32, 2**26)
    found = of.logprobs(one["hidden"], one["target"], one["temperature"])
    logits = torch.nn.functional.linear(one["hidden"], layer.weight, layer.bias) / one["temperature"][:, None]
    expected = torch.log_softmax(logits, -1).gather(1, one["target"][:, None]).squeeze(1)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(each.sum(), (one["hidden"], layer.weight)) for each in (found, expected)]
    assert all(torch.equal(mine, other) for mine, other in zip(*gradients, strict=True))


MEASURE = f"""{PEAK_MB}
import torch
from trainer.learners.head import Head

layer = torch.nn.Linear(512, 2**17, bias=False, dtype=torch.bfloat16)
hidden = torch.randn(8, 512, dtype=torch.bfloat16)
head = Head(layer, softcap=0.0, max_logits=2**26)
hidden @ layer.weight[:64].T
before = peak_mb()
with torch.no_grad():
    head.logprobs(hidden, torch.zeros(8, dtype=torch.int64), torch.ones(8))
    head.most_likely(hidden)
print(peak_mb() - before)
"""


@pytest.mark.slow
def test_no_float32_copy_of_a_head_in_half_precision_is_made():
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2**17 * 512 * 4 / 2**20 / 2  # half of such a copy
