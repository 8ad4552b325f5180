"""SFT: cross-entropy on demonstrations."""

from trainer.losses.loss import LossInputs, LossOutput, needs


@needs(ratio=False, advantage=False)
def sft(inputs: LossInputs) -> LossOutput:
    """-log π_θ."""
    return LossOutput(-inputs.logprob)
