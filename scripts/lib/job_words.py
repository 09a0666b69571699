"""Keeps secrets of a job's command line out of `ps` and out of Ray's log; run by ray.sh.

``job_words.py FOLDER`` reads the words of a command from standard input, each terminated by a zero byte, and prints the
words to submit in the same form. Without secrets they are the same. Otherwise it writes the words from the Python
program on to a file in FOLDER, and prints ``job_words.py --run FILE PROGRAM ...``, which runs the program with them.
"""

import importlib.util
import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def words_to_submit(words: list[str], folder: str) -> list[str]:
    """The words to submit to Ray instead of `words`."""
    shown = without_secrets(words)
    programs = [i for i, word in enumerate(words) if word.endswith(".py") and follows_python(words[:i])]
    if shown == words or not programs:
        return words
    first = programs[0]
    descriptor, path = tempfile.mkstemp(dir=folder, prefix="words-")  # readable by this user alone
    with os.fdopen(descriptor, "w") as file:
        json.dump(words[first:], file)
    return [*shown[:first], str(Path(__file__).resolve()), "--run", path, *shown[first:]]


def follows_python(before: list[str]) -> bool:
    """Whether these words end in a Python interpreter, optionally with its flags without values such as -u."""
    rest = [word for word in before if not re.fullmatch(r"-[bBdEiIOPqsSuvx]+", word)]
    return bool(rest) and re.fullmatch(r"python[\d.]*", Path(rest[-1]).name) is not None


def without_secrets(words: list[str]) -> list[str]:
    """`slimrl.arguments.redact.without_secrets`, loaded from its file: importing the package takes a second."""
    spec = importlib.util.spec_from_file_location("secrets_of_flags", ROOT / "slimrl" / "arguments" / "redact.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.without_secrets(words)


def run(path: str) -> None:
    """Removes the file and runs the program whose words it contains in this process."""
    file = Path(path)
    words = json.loads(file.read_text())
    file.unlink()
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        run(sys.argv[2])
    else:
        given = sys.stdin.buffer.read().split(b"\0")[:-1]
        submitted = words_to_submit([os.fsdecode(word) for word in given], sys.argv[1])
        sys.stdout.buffer.write(b"".join(os.fsencode(word) + b"\0" for word in submitted))
