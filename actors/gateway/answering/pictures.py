"""Pictures that clients send within their requests. Nothing is fetched: an address elsewhere is refused by its place.

Guarantees: what is decoded is within the request's bound of pixels, which is known before anything is decompressed; whatever is
wrong with a picture is one ApiError that names it.
"""

import base64
import binascii
import re
from collections.abc import Sequence

import msgspec

from actors.gateway.errors import bad
from infra.store.images import FORMATS, MAX_IMAGE_BYTES, Pixels, decode_image, image_named
from schemas import Image
from schemas.errors import BadImage

_DATA = re.compile(r"data:([a-z0-9.+-]{1,32}/[a-z0-9.+-]{1,32});base64,", re.IGNORECASE)


class Picture(msgspec.Struct, frozen=True):
    """One picture. image: its name in records. data: the bytes of its file."""

    image: Image
    data: bytes


def read_picture(url: str, where: str) -> Picture:
    """The picture in a data URL. Raises ApiError."""
    head = _DATA.match(url[:128])
    if head is None:
        expected = "expected data:image/…;base64,… with the picture in it: nothing is fetched"
        raise bad(f"{where}: got {url[:40]!r}, {expected}", where, "field_not_accepted")
    if head[1].lower() not in FORMATS:
        raise bad(f"{where}: got {head[1]!r}, expected one of {', '.join(FORMATS)}", where, "field_not_accepted")
    if len(url) > MAX_IMAGE_BYTES * 4 // 3 + 128:
        raise bad(f"{where}: got {len(url)} characters, expected a picture of {MAX_IMAGE_BYTES} bytes at most", where)
    try:
        data = base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(f"{where}: it is not base64: {error}", where) from error
    return Picture(image_named(data, head[1].lower()), data)


def decoded_pictures(images: Sequence[Image], pictures: Sequence[bytes], max_pixels: int) -> tuple[Pixels, ...]:
    """Pixels of all pictures of a request. max_pixels: of all together. Blocks. Raises ApiError."""
    found: list[Pixels] = []
    left = max_pixels
    for image, data in zip(images, pictures, strict=True):
        try:
            pixels = decode_image(image, data, left)
        except BadImage as error:
            raise bad(f"messages: image {len(found)}: {error}", "messages", "invalid_image") from error
        left -= pixels.shape[0] * pixels.shape[1]
        found.append(pixels)
    return tuple(found)
