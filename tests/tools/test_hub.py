"""A model id instead of a folder: downloaded from a fake hub on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimrl.weights.hf_checkpoint import local_hf_folder
from tests.tools.converting import model_args, run_tool_subprocess
from tests.weights.models import save_tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """Serves one repository, `org/tiny`: the list of its files, and each file."""

    folder: Path

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        headers = {"X-Repo-Commit": COMMIT}
        if path.startswith("/api/models/org/tiny"):
            names = sorted(file.name for file in self.folder.iterdir())
            info = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            if "/tree/" in path:
                info = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
            body = json.dumps(info).encode()
            headers["Content-Type"] = "application/json"
        elif path.startswith("/org/tiny/resolve/"):
            body = (self.folder / path.rsplit("/", 1)[1]).read_bytes()
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of the fake hub, and the folder that it serves."""
    folder = save_tiny(tmp_path_factory.mktemp("hub"), "qwen3")
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("TinyHub", (Hub,), {"folder": folder}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()
    thread.join()


def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint: str) -> None:
    """The environment of the tools; huggingface_hub reads it on import."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.slow
def test_model_id_is_downloaded_converted_and_found_again_offline(hub, tmp_path, monkeypatch):
    endpoint, folder = hub
    environment(monkeypatch, tmp_path, endpoint)
    flags = (*model_args("qwen3", tied=True), "--hf-checkpoint", "org/tiny")
    done = run_tool_subprocess("convert_hf_to_torch_dist.py", *flags, "--save", tmp_path / "torch_dist")
    assert done.returncode == 0, done.stderr
    (snapshot,) = (tmp_path / "cache").glob("hub/*/snapshots/*")
    assert "pytorch_model.bin" not in {path.name for path in snapshot.iterdir()}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run_tool_subprocess(
        "convert_torch_dist_to_hf.py",
        *("--input-dir", tmp_path / "torch_dist", "--origin-hf-dir", "org/tiny", "--output-dir", tmp_path / "back"),
    )
    assert done.returncode == 0, done.stderr
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    # the hub's cache consists of links; the result does not
    assert not any(path.is_symlink() for path in (tmp_path / "back").iterdir())


@pytest.mark.slow
def test_unreachable_model_is_one_error(hub, tmp_path, monkeypatch):
    endpoint, _ = hub
    check = ("--input-dir", tmp_path, "--hf-checkpoint")
    environment(monkeypatch, tmp_path, endpoint)
    done = run_tool_subprocess("check_checkpoint.py", *check, "org/absent")
    assert done.returncode == 2 and "--hf-checkpoint org/absent is not a folder" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = run_tool_subprocess("check_checkpoint.py", *check, "org/tiny")
    assert done.returncode == 2 and "could not be downloaded" in done.stderr and "Traceback" not in done.stderr


def test_folder_is_used_directly_and_other_words_are_no_model_id(tmp_path):
    assert local_hf_folder("--hf-checkpoint", tmp_path) == tmp_path
    for word in ("nowhere", "/org/name", "a/b/c", "../name", "./name"):
        with pytest.raises(FileNotFoundError, match=f"--hf-checkpoint {word} does not exist"):
            local_hf_folder("--hf-checkpoint", word)
