"""The API key of a run's servers and router, and its way into their processes.

The key is never in a command line or a log: a child receives it in its environment and removes it there first, and its
`repr` is `***`. Imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # starting a server does not need the flags' modules
    from slimrl.arguments import Arguments

HIDDEN = "***"  # as in slimrl.arguments.redact
VARIABLE = "SLIMRL_SERVER_KEY"
OPTION = "api_key"  # of SGLang's server and of its router
KEY_BYTES = 32


class Key(str):
    """A key whose `repr` is redacted, also inside a logged list or dataclass."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __reduce__(self) -> tuple[type[Key], tuple[str]]:
        return Key, (str(self),)


def new_key() -> Key:
    """A new random key."""
    return Key(secrets.token_urlsafe(KEY_BYTES))


def with_key(args: Arguments) -> Arguments:
    """`args` with the run's key in the server options: --sglang-api-key, or a new key."""
    given = args.sglang_options.get(OPTION)
    key = Key(given) if given else new_key()
    rm_options = args.rm_server_options
    # not for external servers, which may need another key or none
    if args.rm_url is None and args.opd_teacher_urls is None:
        rm_options = rm_options | {OPTION: Key(rm_options[OPTION]) if rm_options.get(OPTION) else key}
    return dataclasses.replace(args, sglang_options=args.sglang_options | {OPTION: key}, rm_server_options=rm_options)


def key_of(args: Arguments) -> str | None:
    """The run's key; None before `with_key`."""
    return args.sglang_options.get(OPTION)


def bearer(key: str | None) -> dict[str, str]:
    """The HTTP header with the key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def key_environment(key: str | None) -> dict[str, str]:
    """The key as a variable of a child's environment, which only its own user can read."""
    return {VARIABLE: str(key)} if key else {}


def pop_key_from_environment(environment: MutableMapping[str, str] = os.environ) -> Key | None:
    """Removes the parent's key from the environment, so that no child inherits it, and returns it."""
    key = environment.pop(VARIABLE, None)
    return Key(key) if key else None
