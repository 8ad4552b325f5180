"""Images by reference: what is read back is what was named, and nothing else is ever shown."""

import asyncio
import io
import struct
import time
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image as Pillow

from infra.store.images import (
    ALTERED,
    MAX_IMAGE_BYTES,
    MAX_SCANS,
    MISSING,
    NOT_AN_IMAGE,
    TOO_LARGE,
    TOO_MANY_PIXELS,
    TOO_MANY_SCANS,
    UNKNOWN_TYPE,
    ImageReader,
    decode_image,
    deposit_image,
    image_named,
)
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Image
from schemas.errors import BadImage


def png(width: int = 4, height: int = 3, colour: tuple[int, int, int] = (255, 0, 0)) -> bytes:
    held = io.BytesIO()
    Pillow.new("RGB", (width, height), colour).save(held, format="PNG")
    return held.getvalue()


def bomb(side: int) -> bytes:
    """A small PNG whose header promises side × side pixels."""
    header = b"IHDR" + side.to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    body = b"IDAT" + zlib.compress(b"\0" * 1000)
    chunks = [(len(one) - 4).to_bytes(4, "big") + one + zlib.crc32(one).to_bytes(4, "big") for one in (header, body)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_what_is_read_is_what_was_put_by_its_hash_and_read_only() -> None:
    store, data = MemoryStore(), png()
    image = image_named(data)
    deposit_image(store, image, data)
    assert list(store.keys(BLOBS)) == [BLOBS + image.sha256]
    pixels = ImageReader(store).read(image)
    assert pixels.shape == (3, 4, 3) and (pixels == (255, 0, 0)).all()
    with pytest.raises(ValueError, match="read-only"):
        pixels[0, 0] = 0


@pytest.mark.parametrize(
    ("data", "media_type", "reason"),
    [
        (b"no picture at all", "image/png", NOT_AN_IMAGE),
        (b"", "image/png", NOT_AN_IMAGE),
        (png(64, 64)[:60], "image/png", NOT_AN_IMAGE),
        (png(), "image/jpeg", NOT_AN_IMAGE),
        (png(), "image/svg+xml", UNKNOWN_TYPE),
        (bomb(5_000), "image/png", TOO_MANY_PIXELS),
        (bomb(60_000), "image/png", TOO_MANY_PIXELS),
        (b"\xff\xd8" + b"\xff\xda\x00\x06\x01\x01\x00\x00\x3f\x00" * 4000, "image/jpeg", TOO_MANY_SCANS),
    ],
)
def test_what_is_no_image_has_a_named_reason_and_is_never_stored(data: bytes, media_type: str, reason: str) -> None:
    store = MemoryStore()
    with pytest.raises(BadImage) as raised:
        deposit_image(store, image_named(data, media_type), data)
    assert raised.value.reason == reason
    assert not list(store.keys(""))


def test_an_image_that_is_gone_altered_or_too_large_is_named_and_not_fetched() -> None:
    store, data = MemoryStore(), png()
    image = image_named(data)

    def reason(of: Image) -> str:
        with pytest.raises(BadImage) as raised:
            ImageReader(store).read(of)
        return raised.value.reason

    assert reason(image) == MISSING
    store.put(BLOBS + image.sha256, png(colour=(0, 0, 255)).ljust(len(data), b"\0")[: len(data)])
    assert reason(image) == ALTERED
    store.put(BLOBS + image.sha256, data + b"more")
    assert reason(image) == ALTERED
    assert reason(Image(sha256=image.sha256, size=MAX_IMAGE_BYTES + 1)) == TOO_LARGE


def test_a_reader_keeps_the_last_arrays_within_its_bound() -> None:
    store = MemoryStore()
    datas = [png(8, 8, (index, 0, 0)) for index in range(3)]
    images = [image_named(data) for data in datas]
    for image, data in zip(images, datas, strict=True):
        deposit_image(store, image, data)
    reader = ImageReader(store, prepare=lambda pixels: pixels.astype(np.float32), max_kept_bytes=2 * 8 * 8 * 3 * 4)
    first = reader.read(images[0])
    assert reader.read(images[0]) is first
    reader.read_all(images[1:])
    assert reader.read(images[0]) is not first


SIDE = 2048  # all pixels that the gateway takes by default


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(body: Sequence[bytes], *, depth: int = 8, colour: int = 6, interlaced: int = 0, side: int = SIDE) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, interlaced))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(body) + chunk(b"IEND", b"")


def scans(*, arithmetic: bool, count: int = MAX_SCANS) -> bytes:
    """A progressive JPEG whose scans repeat; arithmetic decoding does work for each block, also where no data is left."""
    tables = b"".join(b"\xff\xc4" + struct.pack(">HB", 20, kind << 4) + b"\1" + bytes(16) for kind in (0, 1))
    frame = bytes([0xFF, 0xCA if arithmetic else 0xC2]) + struct.pack(">HBHHB", 17, 8, SIDE, SIDE, 3)
    frame += b"".join(bytes([component, 0x11, 0]) for component in (1, 2, 3))

    def scan(first: int, last: int, bits: int, components: Sequence[int]) -> bytes:
        names = b"".join(bytes([component, 0]) for component in components)
        head = struct.pack(">HB", 6 + len(names), len(components))
        return b"\xff\xda" + head + names + bytes([first, last, bits, 0])

    more = [scan(0, 0, 0x10, (1, 2, 3)) if arithmetic else scan(1, 63, 0, (1 + at % 3,)) for at in range(count - 1)]
    begin = b"\xff\xd8\xff\xdb" + struct.pack(">HB", 67, 0) + b"\1" * 64 + frame + (b"" if arithmetic else tables)
    return begin + scan(0, 0, int(arithmetic), (1, 2, 3)) + b"".join(more) + b"\xff\xd9"


def interlaced() -> bytes:
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    rows = [(SIDE - x + dx - 1) // dx for x, _, dx, _ in passes], [(SIDE - y + dy - 1) // dy for _, y, _, dy in passes]
    raw = b"".join((b"\4" + b"\0" * (4 * width)) * height for width, height in zip(*rows, strict=True))
    return png_of([chunk(b"IDAT", zlib.compress(raw, 9))], interlaced=1)


def webp(*, frames: int = 1) -> bytes:
    held = io.BytesIO()
    pictures = [Pillow.new("RGB", (SIDE, SIDE), (at, 0, 0)) for at in range(frames)]
    more = {"save_all": True, "append_images": pictures[1:], "method": 0} if frames > 1 else {"lossless": True}
    pictures[0].save(held, "WEBP", **more)
    return held.getvalue()


SLOW = {
    "scans of a JPEG": (scans(arithmetic=False), "image/jpeg"),
    "scans of an arithmetic JPEG": (scans(arithmetic=True), "image/jpeg"),
    "interlaced PNG": (interlaced(), "image/png"),
    "PNG in chunks of a byte": (
        png_of(
            [chunk(b"tEXt", b"a\0b")] * 60_000
            + [chunk(b"IDAT", bytes([byte])) for byte in zlib.compress(bytes((SIDE + 1) * SIDE), 9)],
            colour=0,
        ),
        "image/png",
    ),
    "PNG with texts that unpack to much": (
        png_of([chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 - 1)))] * 200, side=1), "image/png",
    ),
    "flat WebP": (webp(), "image/webp"),
    "frames of a WebP": (webp(frames=8), "image/webp"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SLOW)
async def test_a_picture_made_to_be_slow_takes_a_processor_for_a_fraction_of_a_second_and_leaves_the_event_loop(
    kind: str,
) -> None:
    """Measured: 0.03 to 0.2 s of CPU time, and at most 0.05 s between two turns of the event loop."""
    data, media_type = SLOW[kind]
    assert len(data) <= 4 * 2**20

    def decode() -> float:
        begin_s = time.thread_time()
        try:
            decode_image(image_named(data, media_type), data, SIDE * SIDE)
        except BadImage as error:
            assert error.reason == NOT_AN_IMAGE
        return time.thread_time() - begin_s

    decoding, stall_s = asyncio.create_task(asyncio.to_thread(decode)), 0.0
    while not decoding.done():
        begin_s = time.process_time()
        await asyncio.sleep(0.001)
        stall_s = max(stall_s, time.process_time() - begin_s)
    decode_s = await decoding
    assert decode_s < 0.6 and stall_s < 0.3
