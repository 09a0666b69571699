"""What an entry point does before anything starts, and says where a run failed."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster import dry_run, main
from slimrl.cluster import run as run_module
from slimrl.observability import logs
from slimrl.rollout.failures import SampleError
from slimrl.rollout.rm_hub.failures import NoVerdictsError


def test_secrets_leave_the_command_before_anything_records_it(monkeypatch):
    words = ["train.py", "--rm-url", "http://me:s3cret@judge", "--router-oracle-password", "s3cret"]
    monkeypatch.setattr(sys, "argv", [*words, "--train-env-vars", '{"A": "s3cret"}'])
    monkeypatch.setattr(main, "parse_args", lambda words, **_: Arguments(dry_run=True))
    monkeypatch.setattr(main, "prepare_ray_environment", lambda: None)
    monkeypatch.setattr(dry_run, "dry_run", lambda args, entry: 7)
    shown = []
    monkeypatch.setattr(main, "show_as", shown.append)
    assert main.main("train.py", lambda run: None) == 7
    hidden = ["train.py", "--rm-url", "http://***@judge", "--router-oracle-password", "***", "--train-env-vars", "***"]
    assert shown == [hidden]


@pytest.fixture
def end(monkeypatch, caplog):
    """Runs `main` with a loop that fails; returns the exit code and what was logged."""
    monkeypatch.setattr(main, "parse_args", lambda *_, **__: Arguments())
    for module, name in (
        (main, "show_as"),
        (main, "prepare_ray_environment"),
        (main, "_Interrupts"),
        (logs, "setup_logging"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(run_module, "open_run", contextlib.nullcontext)

    def run(error: Exception) -> tuple[int, logging.LogRecord]:
        def loop(_) -> None:
            raise error

        code = main.main("train.py", loop, [])
        (record,) = caplog.records
        return code, record

    return run


@pytest.mark.parametrize("kind", [NoVerdictsError, SampleError])
def test_an_error_with_a_sentence_is_that_sentence(end, kind):
    code, record = end(kind("rollout 3: mend the grader"))
    assert (code, record.getMessage(), record.exc_info) == (1, "rollout 3: mend the grader", None)


def test_what_nobody_foresaw_comes_with_its_traceback(end):
    code, record = end(KeyError("x"))
    assert code == 1 and record.exc_info is not None


@pytest.mark.parametrize(("first", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_first_of_several_signals_gives_the_exit_code(first, code, monkeypatch):
    monkeypatch.setattr(main.signal, "signal", lambda *_: None)
    interrupts = main._Interrupts()
    with pytest.raises(KeyboardInterrupt):
        interrupts._handle(first, None)
    interrupts._handle(signal.SIGINT, None)
    assert interrupts.exit_code == code
