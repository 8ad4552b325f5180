import math

import numpy as np
import pytest
import torch

from trainer.losses import offpolicy


def test_effective_share_is_one_for_equal_weights_and_one_over_b_for_a_single_one():
    assert offpolicy.effective_share(np.full(8, 3.0)) == pytest.approx(1.0)
    assert offpolicy.effective_share(np.array([0.0, 0.0, 5.0, 0.0])) == pytest.approx(0.25)
    # (1 + 3)² / (2 (1 + 9)) = 16 / 20
    assert offpolicy.effective_share(np.array([1.0, 3.0])) == pytest.approx(0.8)
    assert offpolicy.effective_share(np.array([])) == 1.0


def test_chi_square_is_the_variance_of_weights_of_mean_one():
    assert offpolicy.chi_square(np.array([0.5, 1.5])) == pytest.approx(0.25)
    assert offpolicy.chi_square(np.ones(5)) == 0.0


def test_k1_and_k3_estimate_the_same_divergence():
    # Two outcomes, μ = (0.5, 0.5), π = (0.25, 0.75): KL(μ‖π) = 0.5 ln 2 + 0.5 ln(2/3) = 0.143841
    log_weight = np.log([0.5, 1.5])
    assert offpolicy.k1(log_weight).mean() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert offpolicy.k3(log_weight).mean() == pytest.approx(offpolicy.k1(log_weight).mean())  # since mean w is 1
    assert (offpolicy.k3(np.linspace(-3, 3, 41)) >= 0).all()
    # Near 0, k3 = x²/2: exact there too, where e^x - 1 - x loses every digit.
    assert offpolicy.k3(np.array([1e-6]))[0] == pytest.approx(5e-13, rel=1e-3)


def test_divergence_mask_is_in_probabilities_and_only_in_the_advantages_direction():
    behaviour = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.001]).log()
    current = torch.tensor([0.8, 0.8, 0.2, 0.2, 0.1]).log()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])
    # The last token grew a hundredfold, but by less than 0.2: it may go on.
    assert offpolicy.divergence_mask(current, behaviour, advantage, 0.2).tolist() == [True, False, False, True, False]


def test_surrogate_clips_only_where_the_surrogate_is_flat():
    ratio = torch.tensor([1.3, 1.3, 0.7, 0.7], requires_grad=True)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    offpolicy.clipped_surrogate(ratio, advantage, 0.2, 0.2).sum().backward()
    flat = offpolicy.surrogate_clips(ratio, advantage, 0.2, 0.2)
    assert flat.tolist() == [True, False, False, True]
    assert ratio.grad.tolist() == [0.0, -1.0, 1.0, 0.0]


def test_log_linear_proximal_is_behaviour_when_fresh_and_nears_current_with_age():
    behaviour, current = torch.full((4,), -2.0), torch.full((4,), -1.0)
    staleness = torch.tensor([-1, 0, 1, 3])
    # α = s/(s+1): 0, 0, 1/2, 3/4
    got = offpolicy.log_linear_proximal(behaviour, current, staleness)
    assert got.tolist() == pytest.approx([-2.0, -2.0, -1.5, -1.25])


def test_staleness_weight_forgets_only_what_is_behind():
    assert offpolicy.staleness_weight(np.array([-1, 0, 2]), 0.5).tolist() == [1.0, 1.0, 0.25]
    assert offpolicy.staleness_weight(torch.tensor([-1, 0, 2]), 0.5).tolist() == [1.0, 1.0, 0.25]


def test_truncation_and_learning_rate():
    assert offpolicy.truncated_weight(torch.tensor([0.0, 3.0]), 5.0).tolist() == [1.0, 5.0]
    assert offpolicy.ess_learning_rate(2e-4, 0.25) == pytest.approx(1e-4)
