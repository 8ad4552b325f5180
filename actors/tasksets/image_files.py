"""The images that rows of a file name: from the folder beside the file into the object store.

Guarantee: a row is yielded only once every image it names lies in the store, as it was named and as one that can be shown;
any other row is handed to `on_broken` with the reason, and the next one follows.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from actors.tasksets.files import Broken, OnBroken, Row
from infra.store.images import deposit_image, images_of
from infra.store.store import BLOBS, Store
from schemas import Image
from schemas.errors import BadImage, NotInStore

FOLDER = "images"  # beside the file: one file for each image, named by its sha256


def with_images(rows: Iterable[Row], file: Path, store: Store, on_broken: OnBroken) -> Iterator[Row]:
    """The rows of `file` whose images are in the store, put there from its `images` folder. Blocking."""
    known: set[Image] = set()
    for row in rows:
        try:
            for image in images_of(row.messages):
                if image not in known:
                    _bring(image, file.parent / FOLDER, store)
                    known.add(image)
        except BadImage as error:
            on_broken(Broken(f"{file}: {row.id}", str(error)))
        else:
            yield row


def _bring(image: Image, folder: Path, store: Store) -> None:
    """One image, from the folder or from the store where an earlier load left it."""
    path = folder / image.sha256
    try:
        deposit_image(store, image, path.read_bytes())
    except OSError as error:
        try:
            size = store.size(BLOBS + image.sha256)
        except NotInStore:
            size = -1
        if size != image.size:
            raise BadImage(
                "missing", f"{path} cannot be read ({error.strerror}), and the store has no such image"
            ) from error
