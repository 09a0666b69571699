"""A run's LoRA adapters in servers that other runs use, too: the run's identity there, and the end of its adapters.

SGLang's unload waits until no request uses the adapter, and all other loads and unloads wait with it. So nothing here
unloads an adapter that is in use. Used by weight updates, external engines and the cleanup after a failed run.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from slimrl.engines.protocol import EngineError
from slimrl.models.adapters import SharedAdapter
from slimrl.processes.files import atomic_file

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
SAME_VERSION_S = 60.0  # longest wait for requests of a version that is sent again, after a failure
AT_END_S = 10.0  # longest wait for the end of a run's requests, whose connections are closed
UNLOAD_TIMEOUT_S = 30.0  # of a call that unloads an adapter at the end of a run
OWNER_FILE = ".adapter_owner"


class AdapterControl(Protocol):
    """The calls about LoRA adapters to one server; part of `server_protocol.WeightControl`."""

    @property
    def url(self) -> str:
        """The server's address."""

    def load_adapter(
        self, name: str, config: dict[str, Any], serialized: list[str], checksums: dict[str, str] | None
    ) -> None:
        """Replaces the adapter `name`, which no request may use meanwhile.

        `config` is PEFT's, `serialized` has one base64 payload per tensor-parallel rank
        (`weights.update.adapter_updater.serialize`). With `checksums`, SHA-256 in hex by PEFT's names, each rank
        compares them with its tensors.
        """

    def unload_adapter(self, name: str) -> None:
        """Removes the adapter `name` if it is loaded; no request may use it."""

    def adapter_requests(self) -> dict[str, int]:
        """The number of requests that use each loaded adapter, by its name."""


def owner_of(folder: Path) -> str:
    """8 hex digits that identify the run that writes into `folder`, the same after it resumes.

    A copied or moved folder gets others: with the same ones, the runs of a folder and of its copy would unload and use
    each other's adapters. So does a folder whose file is damaged.
    """
    path, here = folder / OWNER_FILE, str(folder.resolve())
    if (stored := _stored_owner(path)) is not None:
        owner, written_in = stored
        if written_in == here:
            return owner
        logger.info("%s is a copy of %s, or was moved: its adapters in servers get a new owner", here, written_in)
    owner = uuid.uuid4().hex[:8]
    with atomic_file(path) as unfinished:
        unfinished.write_text(json.dumps({"id": owner, "folder": here}), encoding="ascii")
    return owner


def _stored_owner(path: Path) -> tuple[str, str] | None:
    """The owner, and the folder for which it was written; None if the file has no valid ones."""
    try:
        stored = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(stored, dict) or not re.fullmatch("[0-9a-f]{8}", str(stored.get("id"))):
        return None
    return str(stored["id"]), str(stored.get("folder"))


def wait_until_unused(server: AdapterControl, name: str, timeout_s: float = SAME_VERSION_S) -> None:
    """Waits until no request uses the adapter, if it is loaded. Raises EngineError after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while requests := server.adapter_requests().get(name, 0):
        if time.monotonic() >= deadline:
            raise EngineError(f"{server.url}: {requests} requests use the adapter {name}, and it must be replaced")
        time.sleep(POLL_INTERVAL_S)


def remove_adapters(server: AdapterControl, adapter: SharedAdapter, timeout_s: float = AT_END_S) -> None:
    """Unloads every version of the run from a server, at the end of the run; logs what is left, and raises nothing."""
    deadline = time.monotonic() + timeout_s
    try:
        while own := {
            name: requests for name, requests in server.adapter_requests().items() if name.startswith(adapter.prefix)
        }:
            for name in [name for name, requests in own.items() if not requests]:
                server.unload_adapter(name)
                del own[name]
            if own and time.monotonic() >= deadline:
                logger.warning("%s: requests still use the adapters %s, which stay loaded", server.url, ", ".join(own))
                return
            time.sleep(POLL_INTERVAL_S * bool(own))
    except EngineError as error:
        logger.warning("%s: the adapters %s* may still be loaded: %s", server.url, adapter.prefix, error)


def remove_from_all(servers: Sequence[AdapterControl], adapter: SharedAdapter, timeout_s: float) -> None:
    """`remove_adapters` on all servers in parallel, for `timeout_s` in total; logs the servers that take longer."""
    deadline = time.monotonic() + timeout_s
    # daemons, unlike the threads of an executor: the program ends without waiting for a server that does not answer
    threads = [threading.Thread(target=remove_adapters, args=(server, adapter), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    late = [server.url for server, thread in zip(servers, threads, strict=True) if thread.is_alive()]
    if late:
        logger.warning(
            "the adapters %s* may still be loaded in %s, which did not unload them within %g s",
            adapter.prefix,
            ", ".join(late),
            timeout_s,
        )
