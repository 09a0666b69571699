"""Runs one check in its own process: `python -m tools.gpu_check.child JOB`, started by the runner.

JOB is a JSON file with the function ("module:name"), its arguments, its time limit in seconds, and the file for its
results. Exit code 0: the check completed, passed or failed. An exception ends the process; its traceback is in the log,
which is this process's output.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path

from tools.gpu_check.record import Record, Skip, write_json


def main(argv: list[str]) -> int:
    """Runs the check that the job names."""
    job = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    record = Record(functools.partial(write_json, Path(job["result"])), job["seconds"])
    module, _, name = job["function"].partition(":")
    check = getattr(importlib.import_module(module), name)
    try:
        check(record, **job["arguments"])
    except Skip as reason:
        record.skipped = str(reason)
    record.save(done=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
