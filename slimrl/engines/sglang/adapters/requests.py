"""Which LoRA adapter the requests of a run use, and which weight version their responses are from.

In a run's own servers one adapter has one name, and the servers report the version of its weights. In servers that
other runs use, too, that number is nobody's: there each version is an adapter of its own name, and the name in a
request decides the version of its response. Used by the client.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slimrl.data.sample import add_span
from slimrl.engines.protocol import EngineError, Generation
from slimrl.engines.sglang.adapters.server_patches import ABORT_PATH
from slimrl.models.adapters import SharedAdapter

GENERATES = ("/generate", "/v1/completions", "/v1/chat/completions")
FIELD = "lora_path"
# what SGLang answers for an adapter that it does not have: its owner restarted the server, or has just removed it
_UNKNOWN = ("that has never been loaded", "adapters are not loaded", "Failed to implicitly load LoRA adapter")


class AdapterOfRequests:
    """Of the adapter `adapter`: a name, the versions of a shared one, or None for requests of the base."""

    def __init__(self, adapter: str | SharedAdapter | None) -> None:
        self._adapter = adapter
        self._version: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether each weight version has a name of its own."""
        return isinstance(self._adapter, SharedAdapter)

    def use(self, version: str) -> None:
        """Requests from now on use this version; every server has it."""
        self._version = version

    def named_in(self, path: str, payload: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """`payload` with the adapter unless it names one or None, and the version that the response will be from.

        The version is None if the server reports it. Raises EngineError before the first version.
        """
        if self._adapter is None or path not in GENERATES or FIELD in payload:
            return payload, None
        if not isinstance(self._adapter, SharedAdapter):
            return {FIELD: self._adapter, **payload}, None
        if self._version is None:
            raise EngineError(f"the adapter {self._adapter.name} has no weights yet: no weight update has ended")
        return {FIELD: self._adapter.at(self._version), **payload}, self._version

    def abort_call(self) -> tuple[str, bytes]:
        """Path and body of the call that ends the requests of the run on a server."""
        if isinstance(self._adapter, SharedAdapter):
            return ABORT_PATH, json.dumps({"prefix": self._adapter.prefix}).encode()
        return "/abort_request", b'{"abort_all": true}'

    def is_absent(self, rejection: str) -> bool:
        """Whether a server rejected a request because it does not have the run's adapter."""
        return self.is_shared and any(sentence in rejection for sentence in _UNKNOWN)


def with_version(generation: Generation, version: str) -> Generation:
    """`generation` as from `version`, every token of it."""
    generation.weight_version = version
    generation.version_spans = []
    add_span(generation.version_spans, version, generation.new_tokens)
    return generation


def answer_with_version(answer: Any, version: str) -> Any:
    """The decoded response of a server as from `version`, where it reports one; a list is that of several prompts."""
    if isinstance(answer, list):
        return [answer_with_version(one, version) for one in answer]
    if isinstance(answer, Mapping):
        for field in ("meta_info", "metadata"):  # /generate, OpenAI's calls
            if isinstance(found := answer.get(field), dict) and "weight_version" in found:
                found["weight_version"] = version
                found.pop("weight_versions", None)
    return answer
