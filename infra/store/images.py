"""Images that a record names: bytes in the object store under their hash, read back as pixels within bounds.

Guarantees: a read image is the named image (size and hash are verified); nothing is decompressed before its number of pixels is
known to be within `MAX_PIXELS`, and its scans within `MAX_SCANS`; every fault of an image is a BadImage with a short reason.
Only the decoders of `FORMATS` ever see the bytes. Blocking, as the store is: call from a thread.
"""

import hashlib
import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from infra.newest import Newest
from infra.store.store import BLOBS, Store
from schemas import Image, Message
from schemas.errors import BadImage, NotInStore

MAX_IMAGE_BYTES = 16 * 1024 * 1024
MAX_PIXELS = 16 * 1024 * 1024
MAX_SCANS = 32  # of a progressive JPEG: encoders write about 10; each takes 16 bytes, and a pass over the picture
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}

MISSING = "missing"
ALTERED = "altered"
TOO_LARGE = "too large"
TOO_MANY_PIXELS = "too many pixels"
TOO_MANY_SCANS = "too many scans"
UNKNOWN_TYPE = "unknown media type"
NOT_AN_IMAGE = "not an image"

Pixels = npt.NDArray[np.uint8]  # [height, width, 3], red, green, blue
Array = npt.NDArray[Any]


def images_of(messages: Sequence[Message]) -> tuple[Image, ...]:
    """All images of a conversation, in the order in which they are shown."""
    return tuple(image for message in messages for image in message.images)


def image_named(data: bytes, media_type: str = "image/png") -> Image:
    return Image(sha256=hashlib.sha256(data).hexdigest(), size=len(data), media_type=media_type)


def deposit_image(store: Store, image: Image, data: bytes) -> None:
    """Put the bytes of an image where readers look for them. Raises BadImage for bytes that no reader would take."""
    decode_image(image, data)
    store.put(BLOBS + image.sha256, data)


def decode_image(image: Image, data: bytes, max_pixels: int = MAX_PIXELS) -> Pixels:
    """The pixels of an encoded image. Raises BadImage for bytes that are none."""
    from PIL import Image as Pillow

    check_size(image)
    if len(data) != image.size or hashlib.sha256(data).hexdigest() != image.sha256:
        raise BadImage(ALTERED, f"{image.sha256}: got {len(data)} bytes or another hash, expected {image.size} bytes")
    if image.media_type == "image/jpeg" and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise BadImage(TOO_MANY_SCANS, f"{image.sha256}: got {scans} scans of a JPEG, expected at most {MAX_SCANS}")
    try:
        with Pillow.open(io.BytesIO(data), formats=[FORMATS[image.media_type]]) as picture:
            width, height = picture.size  # of the header alone: nothing is decompressed yet
            if width * height > max_pixels:
                raise _too_many(image, f"{width} x {height}", max_pixels)
            return np.asarray(picture.convert("RGB"))
    except BadImage:
        raise
    except Pillow.DecompressionBombError as error:  # raised by the header, before ours
        raise _too_many(image, str(error), max_pixels) from error
    except Exception as error:  # a decoder of foreign bytes may raise anything, SyntaxError and struct.error too
        raise BadImage(NOT_AN_IMAGE, f"{image.sha256}: no {image.media_type}: {error}") from error


def check_size(image: Image) -> None:
    """Raise BadImage for an image that is not worth fetching."""
    if image.media_type not in FORMATS:
        known = ", ".join(FORMATS)
        raise BadImage(UNKNOWN_TYPE, f"{image.sha256}: got {image.media_type!r}, expected one of {known}")
    if image.size > MAX_IMAGE_BYTES:
        raise BadImage(TOO_LARGE, f"{image.sha256}: got {image.size} bytes, expected at most {MAX_IMAGE_BYTES}")


class ImageReader:
    """Images in a store as arrays, the last ones kept: the episodes of a group look at the same. Threads may share it.

    prepare: makes the array from the pixels; by default the array is the pixels. max_kept_bytes: of arrays.
    """

    def __init__(
        self, store: Store, *, prepare: Callable[[Pixels], Array] = np.asarray, max_kept_bytes: int = 64 * 1024 * 1024
    ) -> None:
        self._store = store
        self._prepare = prepare
        self._kept = Newest[Image, Array](max_size=max_kept_bytes, size=lambda array: array.nbytes)
        self._lock = threading.Lock()

    def read(self, image: Image) -> Array:
        """A read-only array. Raises BadImage where trying again cannot help, StoreError where the store failed."""
        with self._lock:
            array = self._kept.get(image)
        if array is None:
            array = self._prepare(decode_image(image, self.data(image)))
            array.flags.writeable = False
            with self._lock:
                self._kept.put(image, array)
        return array

    def data(self, image: Image) -> bytes:
        """The bytes that lie in an image's place, as many as it has. Raises BadImage, StoreError."""
        check_size(image)
        key = BLOBS + image.sha256
        try:
            size = self._store.size(key)
            data = self._store.get(key) if size == image.size else b""
        except NotInStore as error:
            raise BadImage(MISSING, f"{key} is not in the store") from error
        if size != image.size:
            raise BadImage(ALTERED, f"{key}: got {size} bytes, expected {image.size}")
        return data

    def deposit(self, image: Image, data: bytes) -> None:
        """Put the bytes of an image where readers look for them. Raises BadImage, StoreError."""
        deposit_image(self._store, image, data)

    def read_all(self, images: Sequence[Image]) -> tuple[Array, ...]:
        return tuple(self.read(image) for image in images)


def _too_many(image: Image, got: str, most: int) -> BadImage:
    return BadImage(TOO_MANY_PIXELS, f"{image.sha256}: got {got}, expected at most {most} pixels")
