"""tools/prepare_data.py as a user runs it: from a fake hub on this machine, and from a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tools.converting import run_tool_subprocess

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "main/train.jsonl": '{"question": "1+1?", "answer": "#### 2"}\n{"question": "2+2?", "answer": "#### 4"}\n',
    "socratic/train.jsonl": '{"question": "1+1?", "answer": "#### 2"}\n',
    "README.md": "not wanted",
}


class Hub(BaseHTTPRequestHandler):
    """Serves one dataset, `org/sums`: the list of its files, and each file."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/datasets/org/sums"):
            info = {"id": "org/sums", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            if "/tree/" in path:
                info = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40} for name in FILES]
            body = json.dumps(info).encode()
            headers["Content-Type"] = "application/json"
        else:
            body = FILES[path.removeprefix(f"/datasets/org/sums/resolve/{COMMIT}/")].encode()
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    """The address of the fake hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
def test_hub_dataset_becomes_the_file_of_a_recipe(hub, tmp_path, monkeypatch):
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    out = tmp_path / "gsm8k"
    done = run_tool_subprocess(
        "prepare_data.py", "gsm8k", "--input", "org/sums", "--output-dir", out, "--instruction", ""
    )
    assert (done.returncode, done.stdout) == (0, f"{out}/train.jsonl: 2 of 2 rows\n"), done.stderr
    assert [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()] == [
        {"prompt": [{"role": "user", "content": question}], "label": label}
        for question, label in (("1+1?", "2"), ("2+2?", "4"))
    ]
    assert not list((tmp_path / "cache").rglob("README.md"))


@pytest.mark.slow
def test_impossible_request_is_one_error_with_exit_code_2(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "x"}\n')
    flags = ("gsm8k", "--input", tmp_path / "train.jsonl", "--output-dir", tmp_path / "out")
    done = run_tool_subprocess("prepare_data.py", *flags)
    assert done.returncode == 2
    assert f"{Path('prepare_data.py')}: 1 bad row in {tmp_path}/train.jsonl: " in done.stderr
    assert "Traceback" not in done.stderr
    done = run_tool_subprocess("prepare_data.py", *flags, "--max-bad-rows", "1")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/out/train.jsonl: 0 of 1 rows (bad: 1)\n")
    assert f"left out: {tmp_path}/train.jsonl:1: its columns ['text'] match no known layout" in done.stderr
    done = run_tool_subprocess("prepare_data.py", "preference", "--output-dir", tmp_path / "out")
    assert done.returncode == 2
    assert "--input is needed for preference: give a file, a folder, or an id on the hub" in done.stderr
