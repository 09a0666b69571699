"""Keeps secrets of the command line out of the process list, logs, messages, `summary.json` and W&B's config.

This is the only list of secret flags. No function here returns the value of a secret flag, or a user name or password
within a URL. The entry point calls `set_process_title` once, before it starts any process.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
# environment variables may contain API keys
_OWN = {"wandb_key", "train_env_vars"}
_OF_ENGINES = re.compile(r"password|(^|_)api_keys?$")
_IN_JSON = re.compile(r'("[^"]*(?:password|api_keys?)"\s*:\s*)"[^"]*"')
_USER_OF_URL = re.compile(r"(?<=://)[^/\s\"']*@")


def is_secret(name: str) -> bool:
    """Whether a flag (`--router-api-key`) or a field (`api_key`) is secret."""
    dest = name.removeprefix("--").replace("-", "_")
    return dest in _OWN or _OF_ENGINES.search(dest) is not None


def without_secrets(words: Sequence[str]) -> list[str]:
    """The words of a command line with `***` for every value of a secret flag, `--flag value ...` or `--flag=value`."""
    hidden: list[str] = []
    within = first = False  # inside the values of a secret flag; the first value may begin with dashes
    for word in words:
        name, equals, _ = word.partition("=")
        if first or (within and not word.startswith("--")):
            hidden.append(HIDDEN)
            first = False
            continue
        within = word.startswith("--") and is_secret(name)
        first = within and not equals
        hidden.append(f"{name}={HIDDEN}" if within and equals else redact(word))
    return hidden


def redact_flag(name: str, value: Any) -> Any:
    """A flag's value as messages may show it."""
    return HIDDEN if is_secret(name) else redact(value)


def redact(value: Any) -> Any:
    """`value` without secret entries, user names in URLs and keys in JSON."""
    if isinstance(value, str):
        return _IN_JSON.sub(rf'\1"{HIDDEN}"', _USER_OF_URL.sub(f"{HIDDEN}@", value))
    if isinstance(value, Mapping):
        return {name: redact(entry) for name, entry in value.items() if not is_secret(str(name))}
    if isinstance(value, list | tuple):
        return [redact(entry) for entry in value]
    return value


def set_process_title(words: Sequence[str]) -> None:
    """Replaces `sys.argv`, and the command in the process list, by `words`.

    Does nothing if they are equal: a process title, once set, is limited to the length of the first one.
    """
    if list(words) == sys.argv:
        return
    from setproctitle import setproctitle

    sys.argv[:] = words
    setproctitle(shlex.join([sys.executable, *words]))
