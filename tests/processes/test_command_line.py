"""A secret on the command line appears neither in `sys.argv` nor in the process list."""

import subprocess
import sys

KEY = "0123456789abcdef"
SHOW = """
import sys
from pathlib import Path
from slimrl.arguments.redact import set_process_title
set_process_title(["***" if word == "0123456789abcdef" else word for word in sys.argv])
print(sys.argv[1:], Path("/proc/self/cmdline").read_bytes())
"""


def test_process_list_shows_the_flag_without_its_value():
    words = ["--a-flag", "of some length", "--wandb-key", KEY, "--use-wandb"]
    done = subprocess.run([sys.executable, "-c", SHOW, *words], capture_output=True, text=True, check=True, timeout=60)
    assert KEY not in done.stdout
    assert done.stdout.count("--use-wandb") == 2 and done.stdout.count("***") == 2


def test_process_title_is_unchanged_without_the_flag():
    done = subprocess.run([sys.executable, "-c", SHOW, "--b"], capture_output=True, text=True, check=True, timeout=60)
    assert r"\x00--b\x00" in done.stdout
