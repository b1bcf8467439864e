"""Measured lengths kept beside the data, found again by content and options."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from padless.data._reading import Estimate, Raw
from padless.errors import PadlessError
from padless.files import whole_file

if TYPE_CHECKING:
    from padless.data._reading import Reading
    from padless.data._sources import Source

__all__ = ["Cache", "open_cache"]

_FORMAT = "1"


@dataclass(frozen=True, slots=True)
class Cache:
    """One ``.npz`` file of token counts, and a second one while they are being counted."""

    path: Path

    def load(self) -> Raw | None:
        """What was counted before, or ``None``."""
        try:
            with np.load(self.path) as stored:
                plain = json.loads(stored["plain"].tobytes())
                return Raw(
                    lengths=stored["lengths"].astype(np.int64),
                    targets=stored["targets"].astype(np.int64) if "targets" in stored.files else None,
                    estimate=None if plain["estimate"] is None else Estimate(**plain["estimate"]),
                )
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            return None  # absent, or cut off while it was written: counting again is always right

    def save(self, raw: Raw) -> bool:
        """Keep the counts of a finished pass. Where they cannot be kept, they are still good: that is a warning."""
        arrays: dict[str, npt.NDArray[np.int32]] = {"lengths": raw.lengths.astype(np.int32)}
        if raw.targets is not None:
            arrays["targets"] = raw.targets.astype(np.int32)
        estimate = None if raw.estimate is None else raw.estimate.to_dict()
        plain = np.frombuffer(json.dumps({"estimate": estimate}).encode(), dtype=np.uint8)
        try:
            self._write(self.path, plain=plain, **arrays)
        except OSError as error:
            warnings.warn(
                f"the measured lengths cannot be kept in {self.path.parent}: {error.strerror or error}",
                UserWarning,
                stacklevel=3,
            )
            return False
        with suppress(OSError):
            self._unfinished.unlink()
        return True

    def partial(self) -> list[npt.NDArray[np.int64]]:
        """The counts of an interrupted pass, batch by batch in one table, or nothing."""
        try:
            with np.load(self._unfinished) as stored:
                return [stored["table"].astype(np.int64)]
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            return []

    def save_partial(self, done: list[npt.NDArray[np.int64]]) -> None:
        """Keep what has been counted so far."""
        if done:
            with suppress(OSError):  # told at the end, if it is so still
                self._write(self._unfinished, table=np.concatenate(done).astype(np.int32))

    @property
    def _unfinished(self) -> Path:
        return self.path.with_suffix(".part.npz")

    def _write(self, path: Path, **arrays: npt.NDArray[np.generic]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:  # a reader is another rank, perhaps
            np.savez(file, **arrays)  # type: ignore[arg-type]


def open_cache(cache: bool | str | Path, source: Source, plan: Reading) -> Cache | None:
    """Where the lengths of a source are kept, or ``None`` where they cannot or must not be.

    Raises:
        PadlessError: a folder was given for data or a tokenizer whose content cannot be compared.
    """
    if cache is False:
        return None
    described = plan.describe()
    if source.fingerprint is None or described is None:
        if cache is True:
            return None
        what = "in-memory rows" if source.fingerprint is None else "a function or tokenizer without comparable content"
        raise PadlessError(f"cache={str(cache)!r}: lengths from {what} cannot be found again; pass cache=False")
    folder = source.folder if cache is True else Path(cache)
    if folder is None or (cache is True and not os.access(folder, os.W_OK)):
        return None
    key = hashlib.blake2b(f"{_FORMAT} {described} {source.fingerprint()}".encode(), digest_size=12).hexdigest()
    return Cache((folder / ".padless" if cache is True else folder) / f"lengths-{key}.npz")
