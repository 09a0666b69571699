"""A run's LoRA adapters in servers that other runs use, too: the run's identity there, and the end of its adapters.

SGLang's unload waits until no request uses the adapter, and all other loads and unloads wait with it. So nothing here
unloads an adapter that is in use. Used by weight updates, external engines and the cleanup after a failed run.
"""

from __future__ import annotations

import logging
import time
import uuid
from pathlib import Path
from typing import Any, Protocol

from slimrl.engines.protocol import EngineError
from slimrl.models.adapters import SharedAdapter

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
SAME_VERSION_S = 60.0  # longest wait for requests of a version that is sent again, after a failure
AT_END_S = 10.0  # longest wait for the end of a run's requests, whose connections are closed
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
    """8 hex digits that identify the run that writes into `folder`, the same after it resumes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / OWNER_FILE
    try:
        with path.open("x", encoding="ascii") as file:
            file.write(uuid.uuid4().hex[:8])
    except FileExistsError:
        pass
    return path.read_text(encoding="ascii").strip()


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
