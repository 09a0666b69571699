"""Package versions, log files and progress bars, none of which imports a heavy package."""

import io
import logging
import subprocess
import sys

import numpy
import pytest
import torch

import slimrl
from slimrl.observability.summary import package_versions
from slimrl.observability.terminal import ProgressBar, setup_logging


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def slimrl_logger():
    """Restores the logger afterwards."""
    logger = logging.getLogger("slimrl")
    level, propagate = logger.level, logger.propagate
    yield logger
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.level, logger.propagate = level, propagate


def test_versions_list_the_installed_packages():
    versions = package_versions()
    assert versions["slimrl"] == slimrl.__version__
    # a build may be named by its metadata, by the module, by both or by neither
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert versions["numpy"] == numpy.__version__
    assert "not-installed" not in versions


def test_run_log_is_importable_without_torch_or_a_plotting_package():
    code = (
        "import sys, slimrl.observability.run_log, slimrl.observability.report, slimrl.observability.show,"
        " slimrl.observability.terminal, slimrl.observability.terminal, slimrl.observability.summary\n"
        "print([name for name in ('torch', 'ray', 'matplotlib', 'tensorboard', 'rich', 'tqdm') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_terminal_lines_are_short_and_file_lines_complete(tmp_path, capsys, slimrl_logger):
    file = setup_logging("info", tmp_path)
    slimrl_logger.info("step %d", 3)
    slimrl_logger.warning("careful")
    slimrl_logger.debug("chatter")
    short = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in short] == ["step 3", "WARNING careful"]
    full = file.read_text().splitlines()
    assert file == tmp_path / "logs" / "main.log"
    assert [line.split(" ", 2)[2] for line in full] == ["INFO slimrl: step 3", "WARNING slimrl: careful"]


def test_repeated_setup_does_not_duplicate_lines(tmp_path, capsys, slimrl_logger):
    setup_logging("INFO", tmp_path / "first")
    file = setup_logging("INFO", tmp_path / "second")
    slimrl_logger.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert file.read_text().count("once") == 1
    assert (tmp_path / "first" / "logs" / "main.log").read_text() == ""


def test_bar_shows_its_progress_on_a_terminal():
    stream = Terminal()
    with ProgressBar("generate", stream=stream) as bar:
        assert bar.enabled
        bar.update_to(3, 12)
    assert "generate" in stream.getvalue()
    assert "3/12" in stream.getvalue()


def test_bar_is_silent_in_a_file():
    stream = io.StringIO()
    with ProgressBar("generate", stream=stream) as bar:
        assert not bar.enabled
        bar.update_to(3, 12)
    assert stream.getvalue() == ""


def test_log_line_is_printed_above_the_bar(tmp_path, monkeypatch, slimrl_logger):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging("INFO", tmp_path)
    with ProgressBar("generate") as bar:
        bar.update_to(1, 2)
        stream.truncate(0)
        stream.seek(0)
        slimrl_logger.info("one line")
    before, after = stream.getvalue().split("one line\n")
    assert before.split("\r")[-1].strip().count(":") == 2, "only the time of day before the message"
    assert "generate" not in before.split("\r")[-1]
    assert "1/2" in after, "and the bar is drawn again below"
