"""Tokenizers and models by hub name: a hub that answers is used; one that does not costs seconds and one clear line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from padless import PadlessError
from padless.data._tokenizer import load_tokenizer

pytest.importorskip("transformers")
constants = pytest.importorskip("huggingface_hub").constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def tokenizer_files() -> dict[str, bytes]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    return {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, cache: Path, status: int = 200) -> Iterator[list[str]]:
    """A hub of one tokenizer, someone/words; the paths that were asked for."""
    files = tokenizer_files()
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            asked.append(self.path)
            path = self.path.split("?")[0]
            body, code, extra = b"", status, {}
            if status == 200 and path == "/api/models/someone/words":
                told: dict[str, Any] = {"id": "someone/words", "modelId": "someone/words", "sha": COMMIT, "tags": []}
                body = json.dumps(told).encode()
            elif status == 200 and path.startswith("/someone/words/resolve/") and path.split("/")[-1] in files:
                body = files[path.split("/")[-1]]
                extra = {"X-Repo-Commit": COMMIT, "ETag": f'"{len(body)}"'}
            elif status == 200:
                code = 404
                missing = "EntryNotFound" if "/someone/words" in path else "RepoNotFound"
                extra = {"X-Error-Code": missing, "X-Repo-Commit": COMMIT}
            self.send_response(code)
            for key, value in {**extra, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    use(monkeypatch, f"http://127.0.0.1:{server.server_port}", cache)
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_a_hub_that_answers_is_loaded_from_and_its_cache_serves_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hub(monkeypatch, tmp_path) as asked:
        made = load_tokenizer("someone/words")
        assert made("a b c")["input_ids"] == [0, 1, 2]
        assert any("resolve" in path for path in asked)
        with pytest.raises(
            PadlessError, match=r"'nobody/nothing' is no folder here, and http.* has nothing of that name"
        ):
            load_tokenizer("nobody/nothing")
    use(monkeypatch, "http://127.0.0.1:9", tmp_path)
    assert load_tokenizer("someone/words")("b")["input_ids"] == [1]


def closed(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Any:
    use(monkeypatch, "http://127.0.0.1:9", cache)
    return None


def silent(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Any:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(8)  # it takes connections, and says nothing
    use(monkeypatch, f"http://127.0.0.1:{server.getsockname()[1]}", cache)
    return server


@pytest.mark.parametrize("kind", [closed, silent])
@pytest.mark.parametrize("where", ["data", "bench", "model"])
def test_a_hub_that_does_not_answer_costs_seconds_and_says_so_once(
    kind: Callable[..., Any],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from padless.bench.models import build
    from padless.bench.reading import load_tokenizer as load_for_bench

    held = kind(monkeypatch, tmp_path)
    load = {"data": load_tokenizer, "bench": load_for_bench, "model": build}[where]
    asked: Any = "someone/words"
    started = time.monotonic()
    with pytest.raises(
        PadlessError, match=r"'someone/words' is no folder here and not in the .* cache, and the hub http"
    ):
        load(asked)
    assert time.monotonic() - started < 30
    assert capfd.readouterr().err.strip() == ""
    if held is not None:
        held.close()


def test_a_hub_that_is_out_of_order_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hub(monkeypatch, tmp_path, status=503) as asked, pytest.raises(PadlessError, match="answers with status 503"):
        load_tokenizer("someone/words")
    assert len(asked) == 1


def test_what_can_be_no_name_is_said_without_asking(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with hub(monkeypatch, tmp_path) as asked, pytest.raises(PadlessError, match="neither a folder here nor OWNER/NAME"):
        load_tokenizer("./no/such/folder")
    assert not asked


def test_the_command_line_fails_with_one_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a b"}\n')
    command = [sys.executable, "-m", "padless", "pack", str(rows), "--out", str(tmp_path / "out"), "--capacity", "64"]
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [*command, "--tokenizer", "someone/words"], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "hub http://127.0.0.1:9 does not answer" in lines[0]
