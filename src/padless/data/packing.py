"""Corpora packed offline: files in, Parquet shards of packs out, resumable at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padless.data._inputs import InputFile, describe_file, input_files
from padless.data._pack_plan import WINDOW
from padless.data._pack_run import Run, Settings
from padless.data._pack_work import Runner, TokenTask, Worker, local_runner
from padless.data._reading import _describe_tokenizer, load_tokenizer
from padless.data._shards import ShardFacts, read_facts
from padless.data._sources import Source, open_source
from padless.data._spill import Spill, write_atomically
from padless.data._tokens import LOSSES, Encoder, Loss
from padless.errors import PadlessError, choose
from padless.lengths import positive_int
from padless.planning.pack import METHODS, Method
from padless.planning.slots import Overlong

__all__ = ["PackResult", "Progress", "pack_files"]
