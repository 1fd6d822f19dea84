"""Reader of IDX files, the format of the MNIST family, with every check that can be made.

The format (Y. LeCun, "The MNIST database"): a big-endian 32-bit magic number (two zero bytes, the type
0x08 for unsigned bytes, the number of dimensions), one 32-bit size per dimension, then the values.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hora.core.errors import DataError
from hora.core.plural import plural

__all__ = ["MAGIC_IMAGES", "MAGIC_LABELS", "read_idx"]

MAGIC_IMAGES = 0x00000803
MAGIC_LABELS = 0x00000801


def read_idx(path: Path, magic: int) -> NDArray[np.uint8]:
    """The array in the gzip-compressed IDX file at ``path``: uint8, of the file's shape.

    Args:
        path: a ``.gz`` file.
        magic: the magic number that the file must begin with; its last byte is the number of dimensions.

    Raises:
        DataError: the file is missing, cannot be read, is not gzip, is truncated or longer than its
            header says, or begins with another magic number.
    """
    again = f"Fetch or copy {path.name} again, or give another directory with --data PATH."
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist.",
            fix="Give the directory of Fashion-MNIST's four files with --data PATH, or leave --data out.",
        ) from None
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged: {error}.", fix=again) from error
    except gzip.BadGzipFile as error:
        raise DataError(f"{path} is not a sound gzip file: {error}.", fix=again) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.", fix=again) from error

    dimensions = magic & 0xFF
    header = 4 * (1 + dimensions)
    if len(content) < header:
        size = f"{len(content)} {plural(len(content), 'byte')}"
        raise DataError(f"{path} ends after {size}, inside its header.", fix=again)
    found, *shape = (int(word) for word in np.frombuffer(content, dtype=">u4", count=1 + dimensions))
    if found != magic:
        raise DataError(
            f"{path} begins with the magic number 0x{found:08x}, but 0x{magic:08x} "
            f"(unsigned bytes, {dimensions} {plural(dimensions, 'dimension')}) belongs there.",
            fix="Check that images and labels were not exchanged; the files keep their published names.",
        )
    expected = int(np.prod(shape, dtype=np.int64))
    held = len(content) - header
    if held != expected:
        raise DataError(
            f"{path} holds {held} {plural(held, 'value')}, but its header says {' x '.join(map(str, shape))} "
            f"= {expected}.",
            fix=again,
        )
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)
