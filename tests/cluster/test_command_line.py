"""Startup work of an entry point, and how it reports where a run failed."""

from __future__ import annotations

import contextlib
import logging
import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster import command_line
from slimrl.cluster import run as run_module
from slimrl.cluster.supervisor import ProcessDiedError
from slimrl.cluster.training.train_worker import RankFailedError
from slimrl.cluster.watchdog import WatchdogTimeoutError
from slimrl.data.readers import ChangedDataError
from slimrl.engines.protocol import EngineError, EngineRequestError
from slimrl.observability import run_log, terminal
from slimrl.processes.files import only_run_in
from slimrl.rollout.generation.sample_generator import SampleError
from slimrl.rollout.rm_hub.scorer import TooManyGraderFailuresError


def test_secrets_are_removed_from_the_command_before_it_is_recorded(monkeypatch):
    words = ["train.py", "--rm-url", "http://me:s3cret@judge", "--router-oracle-password", "s3cret"]
    monkeypatch.setattr(sys, "argv", [*words, "--train-env-vars", '{"A": "s3cret"}'])
    monkeypatch.setattr(command_line, "parse_args", lambda words, **_: Arguments(dry_run=True))
    monkeypatch.setattr(command_line, "prepare_ray_environment", lambda: None)
    monkeypatch.setattr(command_line, "dry_run", lambda args, entry: 7)
    shown = []
    monkeypatch.setattr(command_line, "set_process_title", shown.append)
    assert command_line.main("train.py", lambda run: None) == 7
    hidden = ["train.py", "--rm-url", "http://***@judge", "--router-oracle-password", "***", "--train-env-vars", "***"]
    assert shown == [hidden]


def test_local_cluster_gets_a_token_and_a_private_kernel_cache(monkeypatch, tmp_path):
    names = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "TORCHINDUCTOR_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command_line.prepare_ray_environment()
    assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    kernels = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
    assert kernels.parent == tmp_path and kernels.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def end(monkeypatch, caplog):
    """Runs `main` with a failing loop; returns the exit code and the log."""
    monkeypatch.setattr(command_line, "parse_args", lambda *_, **__: Arguments())
    for module, name in (
        (command_line, "set_process_title"),
        (command_line, "prepare_ray_environment"),
        (command_line, "_Interrupts"),
        (terminal, "setup_logging"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(run_module, "open_run", contextlib.nullcontext)

    caplog.set_level(logging.INFO, "slimrl")

    def run(error: Exception) -> tuple[int, logging.LogRecord]:
        def loop(_) -> None:
            raise error

        code = command_line.main("train.py", loop, [])
        record, final_message = caplog.records
        assert final_message.getMessage().startswith("ended before its first step")
        return code, record

    return run


@pytest.mark.parametrize("kind", [TooManyGraderFailuresError, SampleError, ChangedDataError])
def test_expected_error_prints_only_its_message(end, kind):
    code, record = end(kind("rollout 3: fix the grader"))
    assert (code, record.getMessage(), record.exc_info) == (1, "rollout 3: fix the grader", None)


@pytest.mark.parametrize("kind", [ProcessDiedError, EngineError, WatchdogTimeoutError])
def test_lost_process_ends_with_the_exit_code_for_another_try(end, kind):
    code, record = end(kind("train worker rank 3 died"))
    assert (code, record.getMessage(), record.exc_info) == (75, "train worker rank 3 died", None)


def test_error_inside_a_rank_would_be_raised_again(end):
    assert end(RankFailedError("rank 0: ValueError: bad loss"))[0] == 1


def test_rejected_request_would_be_rejected_again(end):
    code, _ = end(EngineRequestError("http://a", 400, "too long"))
    assert code == 1


def test_unexpected_error_prints_its_traceback(end):
    code, record = end(KeyError("x"))
    assert code == 1 and record.exc_info is not None


@pytest.mark.parametrize(("first", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_first_of_several_signals_sets_the_exit_code(first, code, monkeypatch):
    monkeypatch.setattr(command_line.signal, "signal", lambda *_: None)
    interrupts = command_line._Interrupts()
    with pytest.raises(KeyboardInterrupt):
        interrupts._handle(first, None)
    interrupts._handle(signal.SIGINT, None)
    assert interrupts.exit_code == code


WAITS = """
import os, sys, time
from slimrl.cluster.command_line import _Interrupts
interrupts = _Interrupts()
try:
    os.write(int(sys.argv[1]), b"ready")
    time.sleep(float(sys.argv[2]))
except KeyboardInterrupt:
    print("ending", flush=True)  # onto a terminal that may be gone
    sys.exit(interrupts.exit_code)
"""


def waiting(seconds: float, **options) -> subprocess.Popen:
    """A process that waits like a run and handles signals; SIGHUP is not ignored unless an option says so."""
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # tests may be under nohup
    reader, writer = os.pipe()
    command = [sys.executable, "-c", WAITS, str(writer), str(seconds)]
    process = subprocess.Popen(command, pass_fds=[writer], **options)
    os.close(writer)
    assert os.read(reader, 5) == b"ready"
    os.close(reader)
    return process


def test_hangup_ends_a_run_like_other_signals():
    process = waiting(60, stdout=subprocess.DEVNULL)
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 129


def test_run_shuts_down_cleanly_when_its_terminal_closes():
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.login_tty(theirs)

    process = waiting(60, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=take_terminal)
    os.close(theirs)
    os.close(ours)
    assert process.wait(20) == 129


def test_hangup_ignored_by_nohup_stays_ignored():
    process = waiting(1.0, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == 0


def test_second_run_on_one_save_folder_is_rejected_before_ray_starts(end, monkeypatch, tmp_path, caplog):
    args = Arguments(save=str(tmp_path), run_dir=str(tmp_path / "second"), actor_num_nodes=1, actor_num_gpus_per_node=1)

    def no_ray(*_, **__):
        raise AssertionError("Ray was started")

    monkeypatch.undo()
    monkeypatch.setattr(command_line, "parse_args", lambda *_, **__: args)
    for name in ("set_process_title", "prepare_ray_environment", "_Interrupts"):
        monkeypatch.setattr(command_line, name, lambda *_: None)
    monkeypatch.setattr(terminal, "setup_logging", lambda *_: None)
    monkeypatch.setattr(run_log, "make_private", lambda *_: None)
    monkeypatch.setattr(run_module, "ray_session", no_ray)
    with only_run_in(tmp_path, flag="--save", name="first"):
        assert command_line.main("train.py", lambda run: None, []) == 2
    assert f"--save {tmp_path} is used by another run (run first, process {os.getpid()} on" in caplog.text
    assert not (tmp_path / "second").exists()
