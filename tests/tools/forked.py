"""Runs a program of tools/ in a fork of a process that has imported torch, Megatron and transformers already.

The program has its own command line, environment, working folder, stdout and stderr. Only its imports exist before it
starts, which saves the several seconds that most runs would otherwise take. Each test file also has runs in separate
processes.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.megatron import launch


def run(
    script: Path, arguments: list[str], environment: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, ...)`."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = launch.fork_server().Process(
            target=_main, args=(str(script), arguments, environment, os.getcwd(), *map(str, files))
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([str(script), *arguments], timeout)
        output, errors = (path.read_text() for path in files)
        return subprocess.CompletedProcess([str(script), *arguments], process.exitcode, output, errors)


def _main(script: str, arguments: list[str], environment: dict[str, str], folder: str, *files: str) -> None:
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [str(Path(script).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
