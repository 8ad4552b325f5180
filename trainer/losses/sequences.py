"""Sequences and preference pairs among flat tokens: sums over them, and their losses dealt back to their tokens.

Pure. What is dealt back sums to the loss of the sequence, so that one weighted sum over tokens serves every objective.
"""

import torch


def count(sequence: torch.Tensor) -> torch.Tensor:
    """Tokens of each sequence, [S]. sequence: [N] int64, from 0 without gaps."""
    return torch.bincount(sequence)


def sums(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens of each sequence, [S]. values: [N]."""
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


def means(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens of each sequence, [S]."""
    return sums(values, sequence) / count(sequence)


def deal(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """A value per sequence as equal parts on its tokens, [N]. values: [S]."""
    return (values / count(sequence))[sequence]


def required(value: torch.Tensor | None, name: str) -> torch.Tensor:
    """The value; ValueError where a learner did not give it."""
    if value is None:
        raise ValueError(f"{name}: got none, expected one value per sampled token")
    return value


def of_each(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """What all tokens of a sequence have in common, to the bit; the mean where they differ (turns with advantages of their
    own); [S].
    """
    found = values.new_zeros(int(sequence.max()) + 1)
    found[sequence] = values
    return found if bool((found[sequence] == values).all()) else means(values, sequence)
