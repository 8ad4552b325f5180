"""On-policy distillation: on the policy's own samples, towards the teacher's probability of each token."""

from trainer.losses.loss import LossInputs, LossOutput, needs
from trainer.losses.offpolicy import truncated_weight
from trainer.losses.sequences import required


@needs(teacher=True, advantage=False)
def distill(inputs: LossInputs, *, cap: float = 5.0) -> LossOutput:
    """-sg(min(w, cap)·(log π_T - log π_θ))·log π_θ: the gradient of each token's KL(π_θ‖π_T), as a policy gradient.

    The single-step term of MiniLLM, arXiv 2306.08543 section 2.2; without a discounted rest as in "On-Policy
    Distillation" (Thinking Machines, 2025). clipped: where the cap acts. cap: the largest w.
    """
    teacher = required(inputs.teacher, "teacher")
    log_weight = inputs.log_weight.detach()
    gain = teacher - inputs.logprob.detach()
    loss = -truncated_weight(log_weight, cap) * gain * inputs.logprob
    return LossOutput(loss, log_weight.exp() > cap)
