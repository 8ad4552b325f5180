"""Routing: the experts that a mixture-of-experts model used for each token while it sampled, as two sections of a block.

"routing_prompt" has the tokens before the first sampled one, "routing" those from there on: members of a group share their
prompt, and equal runs of a section are stored once. Readers that do not know them carry both along, and drop them where
the tokens change. Each is

    layers u16 LE · k u8 · bytes per expert u8 (1, or 2 where an id is above 255) · a bit per token, whether it has experts ·
    experts [tokens that have some, layers, k]
"""

import struct

import numpy as np
import numpy.typing as npt

from schemas.errors import BadFrame
from schemas.experience import Experience

PROMPT_SECTION, SECTION = "routing_prompt", "routing"
ABSENT = -1  # of a token without recorded experts
MAX_EXPERT = 32_767
MAX_IDS = 128 * 1024 * 1024  # of one experience, those of tokens without any among them

Experts = npt.NDArray[np.int16]

_HEAD = struct.Struct("<HBB")


def routing(experience: Experience) -> Experts | None:
    """The experts of each token, int16 [num_tokens, layers, k], -1 where none were recorded; None where none were for any.

    layers: those that route, in the model's order. k: experts of a token, in the order the router gave them. Raises BadFrame.
    """
    sections = experience.held().extra_sections()
    raws = [sections[name][1] for name in (PROMPT_SECTION, SECTION) if name in sections]
    if not any(raws):
        return None
    cut = experience.num_prompt
    parts = [
        _decoded(raw, num, experience.id)
        for name, num in ((PROMPT_SECTION, cut), (SECTION, experience.num_tokens - cut))
        if (raw := sections.get(name, (1, b""))[1]) or num
    ]
    shapes = {part.shape[1:] for part in parts if part.size}
    if len(shapes) > 1:
        raise BadFrame(
            f"experience {experience.id}: {SECTION}: got layers and k {sorted(shapes)}, expected one of them"
        )
    (shape,) = shapes
    return np.concatenate([part if part.size else np.full((len(part), *shape), ABSENT, np.int16) for part in parts])


def with_routing(experience: Experience, experts_RLk: npt.NDArray[np.integer]) -> Experience:
    """The same experience with the experts of its first R tokens, -1 (of a whole token) where there are none.

    Raises ValueError for what does not fit.
    """
    num_R, num = len(experts_RLk), experience.num_tokens
    if experts_RLk.ndim != 3 or experts_RLk.dtype.kind not in "iu" or num_R > num or not experts_RLk.size:
        raise ValueError(
            f"experience {experience.id}: {SECTION}: got {experts_RLk.dtype} {experts_RLk.shape}, expected integers of at"
            f" most {num} tokens, of layers and of experts"
        )
    if experts_RLk.max() > MAX_EXPERT or ((experts_RLk < 0) != (experts_RLk[:, :1, :1] < 0)).any():
        raise ValueError(
            f"experience {experience.id}: {SECTION}: got {experts_RLk.min()} to {experts_RLk.max()}, expected 0 to"
            f" {MAX_EXPERT}, or -1 for all layers of a token"
        )
    cut = experience.num_prompt
    whole = np.full((num, *experts_RLk.shape[1:]), ABSENT, np.int16)
    whole[:num_R] = experts_RLk
    found = {PROMPT_SECTION: _encoded(whole[:cut]), SECTION: _encoded(whole[cut:])}
    return _with_sections(experience, {name: (1, raw) for name, raw in found.items() if raw})


def _with_sections(experience: Experience, sections: dict[str, tuple[int, bytes]]) -> Experience:
    carried = {
        name: section
        for name, section in experience.held().extra_sections().items()
        if name not in (PROMPT_SECTION, SECTION)
    }
    made = experience.with_bulk()
    made.held().extras = {**carried, **sections}
    return made


def _encoded(experts_TLk: Experts) -> bytes:
    has_T = experts_TLk[:, 0, 0] >= 0
    if not has_T.any():
        return b""
    found = experts_TLk[has_T]
    size = 1 if found.max() <= 0xFF else 2
    ids = found.astype(f"<u{size}").tobytes()
    return b"".join((_HEAD.pack(*found.shape[1:], size), np.packbits(has_T).tobytes(), ids))


def _decoded(raw: bytes, num: int, owner: str) -> Experts:
    """int16 [num, layers, k], or [num, 0, 0] where there is nothing."""
    if not raw:
        return np.zeros((num, 0, 0), np.int16)
    head = _HEAD.unpack_from(raw) if len(raw) >= _HEAD.size else (0, 0, 0)
    layers, k, size = head
    bits = -(-num // 8)
    if not 0 < num * layers * k <= MAX_IDS or size not in (1, 2) or len(raw) < _HEAD.size + bits:
        raise BadFrame(f"experience {owner}: {SECTION}: got {len(raw)} bytes with layers, k and width {head}")
    flags = np.frombuffer(raw, np.uint8, bits, _HEAD.size)
    has_T = np.unpackbits(flags, count=num).astype(bool)
    expected = _HEAD.size + bits + int(has_T.sum()) * layers * k * size
    if len(raw) != expected:
        raise BadFrame(f"experience {owner}: {SECTION}: got {len(raw)} bytes, expected {expected} for its tokens")
    ids = np.frombuffer(raw, f"<u{size}", offset=_HEAD.size + bits)
    if ids.size and ids.max() > MAX_EXPERT:
        raise BadFrame(f"experience {owner}: {SECTION}: got expert {ids.max()}, expected at most {MAX_EXPERT}")
    found = np.full((num, layers, k), ABSENT, np.int16)
    found[has_T] = ids.reshape(-1, layers, k)
    return found
