"""Synchronous calls to one SGLang server about its LoRA adapters; part of `control.ServerControl`."""

from __future__ import annotations

import abc
from typing import Any

import msgspec

from slimrl.engines.http import decode_as
from slimrl.engines.protocol import EngineRequestError
from slimrl.engines.sglang.adapters.server_patches import COUNTS_PATH

_NOT_LOADED = "does not exist"  # of a server that has no adapter of this name


class _Counts(msgspec.Struct):
    adapters: dict[str, int]


class AdapterControl(abc.ABC):
    """Implements the calls about adapters of `engines.server_protocol.WeightControl`. The server has --enable-lora."""

    url: str

    def load_adapter(
        self, name: str, config: dict[str, Any], serialized: list[str], checksums: dict[str, str] | None
    ) -> None:
        """Replaces the LoRA adapter `name`; no request may use it meanwhile."""
        self.unload_adapter(name)
        body = {"lora_name": name, "config_dict": config, "serialized_named_tensors": serialized}
        self._post(
            "/load_lora_adapter_from_tensors",
            {**body, "load_format": "flattened_bucket", "expected_checksums": checksums},
        )

    def unload_adapter(self, name: str) -> None:
        """Removes the adapter if it is loaded.

        SGLang waits until no request uses it, and loads and unloads no other adapter meanwhile.
        """
        try:
            self._post("/unload_lora_adapter", {"lora_name": name})
        except EngineRequestError as error:
            if _NOT_LOADED not in str(error):
                raise

    def adapter_requests(self) -> dict[str, int]:
        """The number of requests that use each loaded adapter, by its name; slimrl's program has started the server."""
        return decode_as(self._get(COUNTS_PATH), _Counts, f"{self.url}{COUNTS_PATH}").adapters

    @abc.abstractmethod
    def _get(self, path: str) -> Any:
        """The decoded response to a GET of `path`."""

    @abc.abstractmethod
    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The decoded response to a POST of `body` to `path`."""
