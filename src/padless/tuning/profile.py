"""What tuning found, in a file that every integration reads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from padless.cost import CostModel
from padless.errors import PadlessError
from padless.files import write_text
from padless.lengths import positive_int

__all__ = ["DEFAULT_PATH", "PATH_VARIABLE", "Profile", "describe", "load_profile", "profile_path"]

DEFAULT_PATH = "padless-profile.json"
PATH_VARIABLE = "PADLESS_PROFILE"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A tuned token budget and cost model, with what they hold for.

    Attributes:
        token_budget: the largest number of padded tokens of one micro-batch that fits, headroom taken off.
        cost: seconds of a micro-batch, or ``None`` where nothing was timed.
        model: class and parameter count of the tuned model; a profile of another model is refused.
        device: where it was tuned.
        max_length: the longest row that was tried.
        memory_limit: bytes that a micro-batch had to fit in.
        peak_memory: bytes that the largest fitting trial needed.
        trials: (rows, width, fits, peak bytes) of every trial.
        details: dtype, gradient checkpointing, versions.
    """

    token_budget: int
    cost: CostModel | None = None
    model: str = ""
    device: str = "cpu"
    max_length: int = 0
    memory_limit: int = 0
    peak_memory: int = 0
    trials: tuple[tuple[int, int, bool, int], ...] = ()
    details: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positive_int(self.token_budget, name="token_budget")

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "trials": [list(trial) for trial in self.trials], "format": _FORMAT}

    def save(self, path: str | Path = DEFAULT_PATH) -> Path:
        """Write it as JSON, whole or not at all; `load_profile` reads it back equal.

        Raises:
            PadlessError: the path cannot be written.
        """
        place = Path(path)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, json.dumps(self.to_dict(), indent=2) + "\n")  # ranks read it while another writes
        except OSError as error:
            raise PadlessError(f"cannot write the profile {place}: {error.strerror or error}") from error
        return place

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile that `save` wrote."""
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))
            if held.pop("format") != _FORMAT:
                raise KeyError("format")
            held["cost"] = None if held["cost"] is None else CostModel(**held["cost"])
            held["trials"] = tuple((int(r), int(w), bool(f), int(p)) for r, w, f, p in held["trials"])
            return cls(**held)
        except FileNotFoundError:
            raise PadlessError(
                f"there is no profile at {path}: run padless tune, or give token_budget a number"
            ) from None
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise PadlessError(f"{path} is not a profile of this version of padless ({error}): tune again") from None


def describe(model: Any) -> str:
    """Class and parameter count: what tells models of another size apart.

    Wrappers (DDP, compiled modules) are looked through.
    """
    inner = getattr(model, "module", getattr(model, "_orig_mod", model))
    count = sum(int(parameter.numel()) for parameter in inner.parameters())
    return f"{type(inner).__name__.removeprefix('FSDP')}:{count}"


def profile_path(path: str | Path | None = None) -> Path:
    """Where a profile is looked for: ``path``, else ``$PADLESS_PROFILE``, else the working directory.

    >>> profile_path("kept.json").name
    'kept.json'
    """
    return Path(path or os.environ.get(PATH_VARIABLE) or DEFAULT_PATH)


def load_profile(path: str | Path | None = None, *, model: Any = None) -> Profile:
    """The profile at ``path``, at ``$PADLESS_PROFILE``, or in the working directory.

    Args:
        path: where to look; ``None`` tries the environment, then ``padless-profile.json``.
        model: a module that the profile must have been made for; ``None`` does not ask.

    Raises:
        PadlessError: no profile there, or one of another model.
    """
    place = profile_path(path)
    profile = Profile.load(place)
    if model is not None and profile.model and describe(model) != profile.model:
        raise PadlessError(
            f"the profile {place} was made for {profile.model}; this model is {describe(model)}: tune it, or give"
            " token_budget a number"
        )
    return profile
