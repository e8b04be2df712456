"""Folders of results: made and tried before the work, and filled so that nobody meets half a file."""

import pathlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from .console import InputError


def claim(folder: pathlib.Path) -> None:
    """Make sure that `folder` can be written, before hours are spent on its content.

    Raises:
        InputError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"--out {folder}: the folder cannot be written ({error.strerror or error})") from None


@contextmanager
def replaced(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to write to; what is written there takes the place of `path`, whole or not at all.

    Raises:
        InputError: the disk is full, or the folder is gone.
    """
    half = path.with_suffix(".part")
    try:
        yield half
        half.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror or error})") from None
    finally:
        half.unlink(missing_ok=True)
