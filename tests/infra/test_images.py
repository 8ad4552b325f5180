"""Images by reference: what is read back is what was named, and nothing else is ever shown."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow

from infra.store.images import (
    ALTERED,
    MAX_IMAGE_BYTES,
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
    images_of,
)
from infra.store.memory import MemoryStore
from infra.store.store import BLOBS
from schemas import Image, Message
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


def test_images_of_a_conversation_come_in_the_order_in_which_they_are_shown() -> None:
    images = [image_named(png(colour=(index, 0, 0))) for index in range(3)]
    messages = (
        Message(role="user", content="these", images=tuple(images[:2])),
        Message(role="user", content="and that", images=(images[2],)),
    )
    assert images_of(messages) == tuple(images)


def test_the_pixels_of_a_picture_with_transparency_and_of_a_grey_one_are_red_green_and_blue() -> None:
    for mode in ("RGBA", "L", "P", "1"):
        held = io.BytesIO()
        Pillow.new(mode, (2, 2)).save(held, format="PNG")
        assert decode_image(image_named(held.getvalue()), held.getvalue()).shape == (2, 2, 3)
