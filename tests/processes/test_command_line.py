"""A secret of the command line is shown neither in `sys.argv` nor in the process list."""

import subprocess
import sys

import pytest

from slimrl.processes.command_line import without_values

KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["--wandb-key", KEY, "--lr", "1"], ["--wandb-key", "***", "--lr", "1"]),
        ([f"--wandb-key={KEY}"], ["--wandb-key=***"]),
        (["--wandb-key"], ["--wandb-key"]),
        (["--wandb-key-of-mine", KEY], ["--wandb-key-of-mine", KEY]),
        (["--wandb-key", KEY, f"--wandb-key={KEY}"], ["--wandb-key", "***", "--wandb-key=***"]),
    ],
)
def test_values_of_these_flags_are_hidden_and_no_others(words, hidden):
    assert without_values(words, ["--wandb-key"]) == hidden


SHOW = """
import sys
from pathlib import Path
from slimrl.processes.command_line import hide_values
hide_values(["--wandb-key"])
print(sys.argv[1:], Path("/proc/self/cmdline").read_bytes())
"""


def test_the_process_list_shows_the_flag_without_its_value():
    words = ["--a-flag", "of some length", "--wandb-key", KEY, "--use-wandb"]
    done = subprocess.run([sys.executable, "-c", SHOW, *words], capture_output=True, text=True, check=True, timeout=60)
    assert KEY not in done.stdout
    assert done.stdout.count("--use-wandb") == 2 and done.stdout.count("***") == 2


def test_without_the_flag_the_process_list_is_left_alone():
    done = subprocess.run([sys.executable, "-c", SHOW, "--b"], capture_output=True, text=True, check=True, timeout=60)
    assert r"\x00--b\x00" in done.stdout
