"""What is loaded by name from a model hub: from the hub where it answers, else from the cache, without a long wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from padless.errors import PadlessError

__all__ = ["load_by_name"]

Loaded = TypeVar("Loaded")
_PATIENCE = 5.0  # seconds for the hub's first answer; its own client would retry for minutes


def load_by_name(what: str, name: str, load: Callable[[bool], Loaded]) -> Loaded:
    """``load(local_files_only)`` of a folder, or of a name on the Hugging Face hub.

    The hub is asked once, and shortly, whether it has the name. If it does not answer, what an earlier load left in the
    cache on this machine is taken.

    Args:
        what: how messages call it, as in "tokenizer".
        name: a folder, or OWNER/NAME.

    Raises:
        PadlessError: the hub does not know the name, or does not answer and the cache does not hold it. What ``load``
            raises otherwise is passed on.

    >>> load_by_name("tokenizer", ".", lambda local_files_only: local_files_only)
    True
    """
    if Path(name).exists():
        return load(True)
    trouble = _ask(what, name)
    if trouble is None:
        return load(False)
    try:
        with _offline():
            return load(True)
    except Exception as error:
        raise PadlessError(
            f"{what} {name!r} is no folder here and not in the Hugging Face cache, and {trouble}: name a folder, or try"
            " again when there is a connection"
        ) from error


@contextmanager
def _offline() -> Iterator[None]:
    """Some loaders ask the hub in spite of ``local_files_only``."""
    from huggingface_hub import constants

    was, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was


def _ask(what: str, name: str) -> str | None:
    """Why the hub cannot be used; ``None`` where it can."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE says not to ask the hub"
    hub = constants.ENDPOINT
    try:
        HfApi(endpoint=hub).model_info(name, timeout=_PATIENCE)
    except HFValidationError:
        raise PadlessError(f"{what} {name!r} is neither a folder here nor OWNER/NAME on a hub") from None
    except RepositoryNotFoundError:
        raise PadlessError(
            f"{what} {name!r} is no folder here, and {hub} has nothing of that name, or not for this user"
        ) from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        return f"the hub {hub} answers with status {status}" if status >= 500 or status == 429 else None
    except Exception as error:  # of whichever HTTP client huggingface_hub is built on
        return f"the hub {hub} does not answer ({str(error) or type(error).__name__})"
    return None
