"""XXH3-128 of tensors that lie on a card, read there at the speed of its memory; the same hash that a host computes.

XXH3 adds up 64 bytes at a time into eight sums, and mixes these after each 1,024. What a block of 1,024 bytes adds depends on
no other block, so a card adds up all blocks at once. Only the mixing goes block by block: a kernel does it, one program a
tensor, with 64 bytes of each 1,024. What is left behind the last whole block is brought to the host and finished there.

Source: the XXH3 specification of xxHash, "XXH3 Algorithm (for large inputs)", with its default secret and seed 0.
"""

import struct
from collections.abc import Callable, Sequence

import torch

BLOCK_BYTES, STRIPE_BYTES, LANES = 1024, 64, 8
STRIPES = BLOCK_BYTES // STRIPE_BYTES
LEAST_BYTES = 241  # shorter inputs are hashed in other ways
AT_ONCE = 2**16  # blocks that are added up in one go: what is made of them takes several times their size

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248ee035"
    "90e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04b"
    "cdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad0"
    "31ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5, AVALANCHE = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0x165667919E3779F9
FIRST_SUMS = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
LOW_HALF, ALL = 2**32 - 1, 2**64 - 1

Mix = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""The sums of the blocks of each tensor, [blocks, 8] i64, to the eight sums behind its last whole block, [tensors, 8] i64."""


def hash_on_card(tensors: Sequence[torch.Tensor], mix: Mix) -> list[str]:
    """xxh3-128 of the bytes of each, hexadecimal. tensors: contiguous, all on one device, LEAST_BYTES at least."""
    flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    mixed = mix([block_sums(tensor[: _whole_blocks(tensor) * BLOCK_BYTES]) for tensor in flat]).tolist()
    rests = torch.cat([tensor[_rest_from(tensor) :] for tensor in flat]).cpu().numpy().tobytes()
    found, at = [], 0
    for tensor, sums in zip(flat, mixed, strict=True):
        size = tensor.numel() - _rest_from(tensor)
        found.append(_finish(sums, rests[at : at + size], tensor.numel()))
        at += size
    return found


def _whole_blocks(flat: torch.Tensor) -> int:
    """Number of mixed blocks: behind the last of them at least one byte is left."""
    return (flat.numel() - 1) // BLOCK_BYTES


def _rest_from(flat: torch.Tensor) -> int:
    """First byte that the host finishes: the rest holds the last 64 of all, which may reach into a whole block."""
    return max(0, min(_whole_blocks(flat) * BLOCK_BYTES, flat.numel() - STRIPE_BYTES))


def block_sums(flat: torch.Tensor) -> torch.Tensor:
    """Each block's addend to the eight sums, [blocks, 8] i64. flat: u8, whole blocks."""
    secret = torch.tensor(
        [[_word(SECRET, 8 * (stripe + lane)) for lane in range(LANES)] for stripe in range(STRIPES)],
        dtype=torch.int64,
        device=flat.device,
    )
    words = flat.view(torch.int64).view(-1, STRIPES, LANES)
    found = torch.empty(len(words), LANES, dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), AT_ONCE):
        some = words[start : start + AT_ONCE]
        keyed = some ^ secret
        products = (keyed & LOW_HALF).mul_((keyed >> 32).bitwise_and_(LOW_HALF))
        swapped = some.sum(1).view(-1, LANES // 2, 2).flip(-1).view(-1, LANES)
        torch.add(products.sum(1), swapped, out=found[start : start + AT_ONCE])
    return found


def mix_on_host(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Mix block by block: the reference for the kernel."""
    keys = mixing_keys()
    found = []
    for tensor in sums:
        total = list(FIRST_SUMS)
        for block in tensor.tolist():
            for lane, added in enumerate(block):
                word = (total[lane] + added) & ALL
                total[lane] = ((word ^ word >> 47 ^ keys[lane] & ALL) * PRIME32_1) & ALL
        found.append([signed(word) for word in total])
    return torch.tensor(found, dtype=torch.int64).view(-1, LANES)


def mixing_keys() -> list[int]:
    """The key of each of the eight sums."""
    return [_word(SECRET, len(SECRET) - STRIPE_BYTES + 8 * lane) for lane in range(LANES)]


def _finish(mixed: Sequence[int], rest: bytes, size: int) -> str:
    """Add what is behind the last whole block, then the last 64 bytes, and bring the sums together. size: of the whole."""
    sums = [word & ALL for word in mixed]
    behind = rest[len(rest) - (size - (size - 1) // BLOCK_BYTES * BLOCK_BYTES) :]
    for stripe in range((len(behind) - 1) // STRIPE_BYTES):
        _add(sums, behind[stripe * STRIPE_BYTES :], 8 * stripe)
    _add(sums, rest[-STRIPE_BYTES:], len(SECRET) - STRIPE_BYTES - 7)
    low = _merged(sums, 11, size * PRIME64_1 & ALL)
    high = _merged(sums, len(SECRET) - STRIPE_BYTES - 11, ~(size * PRIME64_2) & ALL)
    return f"{high:016x}{low:016x}"


def _add(sums: list[int], stripe: bytes, at: int) -> None:
    for lane in range(LANES):
        word = int.from_bytes(stripe[8 * lane : 8 * lane + 8], "little")
        keyed = word ^ _word(SECRET, at + 8 * lane) & ALL
        sums[lane ^ 1] = (sums[lane ^ 1] + word) & ALL
        sums[lane] = (sums[lane] + (keyed & LOW_HALF) * (keyed >> 32)) & ALL


def _merged(sums: Sequence[int], at: int, start: int) -> int:
    for lane in range(0, LANES, 2):
        tensor = sums[lane] ^ _word(SECRET, at + 8 * lane) & ALL
        other = sums[lane + 1] ^ _word(SECRET, at + 8 * lane + 8) & ALL
        product = tensor * other
        start = (start + ((product & ALL) ^ product >> 64)) & ALL
    start ^= start >> 37
    start = start * AVALANCHE & ALL
    return start ^ start >> 32


def _word(data: bytes, at: int) -> int:
    """Eight bytes as torch has them, signed."""
    found: int = struct.unpack_from("<q", data, at)[0]
    return found


def signed(word: int) -> int:
    """A word of 64 bits as torch has it.

    >>> signed(2**64 - 1)
    -1
    """
    return word - 2**64 if word >> 63 else word
