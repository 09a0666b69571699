"""The key that every server and router of a run asks for, and how it reaches their processes.

Promises that the key is in no command line and in no log: it travels in the environment of a child, which takes it
out before it does anything else, and shows as `***` wherever a value is represented. Imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what starts a server need not read all flags
    from slimrl.arguments import Arguments

HIDDEN = "***"  # as in slimrl.arguments.redact
VARIABLE = "SLIMRL_SERVER_KEY"
OPTION = "api_key"  # of SGLang's server and of its router
KEY_BYTES = 32


class Key(str):
    """A key whose representation does not tell it, also within a list or a dataclass that is logged."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)

    def __reduce__(self) -> tuple[type[Key], tuple[str]]:
        return Key, (str(self),)


def new_key() -> Key:
    """A key that nobody guesses."""
    return Key(secrets.token_urlsafe(KEY_BYTES))


def with_key(args: Arguments) -> Arguments:
    """`args` with the run's key among the options of the servers: the user's (--sglang-api-key), or one of its own."""
    given = args.sglang_options.get(OPTION)
    key = Key(given) if given else new_key()
    own = args.rm_server_options
    if args.rm_url is None:  # servers of the run's own: those of the user's may ask for another key, or for none
        own = own | {OPTION: Key(own[OPTION]) if own.get(OPTION) else key}
    return dataclasses.replace(args, sglang_options=args.sglang_options | {OPTION: key}, rm_server_options=own)


def key_of(args: Arguments) -> str | None:
    """The run's key; None before `with_key`."""
    return args.sglang_options.get(OPTION)


def bearer(key: str | None) -> dict[str, str]:
    """The header of a call that shows the key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def for_child(key: str | None) -> dict[str, str]:
    """The key as a variable of a child's environment, which only its own user can read."""
    return {VARIABLE: str(key)} if key else {}


def taken(environment: MutableMapping[str, str] = os.environ) -> Key | None:
    """The key that the parent gave, taken out of the environment, so that no child inherits it."""
    key = environment.pop(VARIABLE, None)
    return Key(key) if key else None
