"""Pictures that a data set stores compressed."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np

from pipelines.errors import IntegrityError
from pipelines.files.malformed import reason
from pipelines.formats.base import require


def decoded(pictures: Sequence[bytes], what: str, *, extra: str = "minari") -> np.ndarray:
    """Return (n, height, width[, channels]) uint8. InputMissing without pillow, which `extra` brings; IntegrityError
    for what is not a picture.
    """
    require("PIL", extra, f"'{what}' with its compressed pictures")
    from PIL import Image, UnidentifiedImageError

    try:
        return np.stack([np.asarray(Image.open(io.BytesIO(picture)), dtype=np.uint8) for picture in pictures])
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise IntegrityError(
            f"'{what}': a picture is damaged: {reason(error)}", hint="fetch or make it again"
        ) from error
