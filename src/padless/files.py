"""Files that others find whole or not at all, whatever stops the one who writes them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["whole_file", "write_text"]


@contextmanager
def whole_file(path: str | Path, *, durable: bool = False, scratch: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write into, that takes the place of ``path`` once it is complete.

    An error, an interrupt or a full disk leaves what was there before. A link stays, and what it names is replaced. A
    device or a pipe is written as it is, and so is a file in a folder where no other can be made.

    Args:
        durable: also wait until the disk has it, so that it outlives a power cut.
        scratch: folder, on the same file system, for the unfinished file, which a kill may leave behind; by default
            the file's own.

    Raises:
        OSError: it cannot be written.
    """
    if _special(Path(path)):
        with open(path, "wb") as out:
            yield out
        return
    place = Path(os.path.realpath(path))
    aside = (scratch or place.parent) / f".{place.name}.{os.getpid()}.{threading.get_ident()}.tmp"
    try:
        opened = open(aside, "wb")  # noqa: SIM115 (closed below)
    except PermissionError:
        if durable or scratch is not None or not place.exists():
            raise
        with open(place, "wb") as out:
            yield out
        return
    try:
        with opened as out:
            yield out
            if durable:
                out.flush()
                os.fsync(out.fileno())
        with suppress(OSError):  # new files have the mode that the user's mask gives them
            aside.chmod(place.stat().st_mode)
        aside.replace(place)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text to ``path``, as `whole_file` does."""
    with whole_file(path) as out:
        out.write(text.encode("utf-8"))


def _special(path: Path) -> bool:
    """Whether it is no plain file, and will be none: also ``/dev/stdout``, which may lead to one."""
    return str(path.absolute()).startswith(("/dev/", "/proc/")) or (path.exists() and not path.is_file())
