"""vLLM's row in the table of engines (`engines.backend`), chosen by `--rollout-engine vllm`.

Its server speaks SGLang's HTTP calls (`environment/slimrl_vllm_calls.py`), so router, client and control are SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimrl.arguments.parser import PassthroughTables
    from slimrl.engines.backend import (
        ClientFactory,
        ControlFactory,
        ExternalRouterFactory,
        RouterFactory,
        ServerFactory,
    )
    from slimrl.engines.server_protocol import ExternalServer
    from slimrl.models.adapters import AdapterConfig


class VllmBackend:
    """Implements `EngineBackend`."""

    title = "vLLM"
    packages = ("sglang_router",)  # in this environment; vllm is in its own

    @property
    def server(self) -> ServerFactory:
        """One server on one node."""
        from slimrl.engines.vllm.server import ServerProcess

        return ServerProcess

    @property
    def router(self) -> RouterFactory:
        """The SGLang router as a child process."""
        from slimrl.engines.sglang.router import RouterProcess

        return RouterProcess

    @property
    def external_router(self) -> ExternalRouterFactory:
        """An external SGLang router."""
        from slimrl.engines.sglang.router import ExternalRouter

        return ExternalRouter

    @property
    def client(self) -> ClientFactory:
        """Generation through the router."""
        from slimrl.engines.sglang.client import RouterClient

        return RouterClient

    @property
    def control(self) -> ControlFactory:
        """Weights, pauses and load of one server."""
        from slimrl.engines.sglang.control import ServerControl

        return ServerControl

    def inspect(
        self, address: str, hf_checkpoint: str, *, needs_weight_sync: bool = True, key: str | None = None
    ) -> ExternalServer:
        """Checks whether an external server, vLLM's with the calls of slimrl, can serve the run."""
        from slimrl.engines.vllm.external_server_check import inspect

        return inspect(address, hf_checkpoint, needs_weight_sync=needs_weight_sync, key=key)

    def router_options(
        self, given: Mapping[str, Any], *, request_timeout_s: int, conversations: bool, disaggregated: bool = False
    ) -> dict[str, Any]:
        """See `sglang.router.router_options`."""
        from slimrl.engines.sglang.router import router_options

        return router_options(given, request_timeout_s=request_timeout_s, conversations=conversations)

    def flags(self, words: Sequence[str]) -> PassthroughTables:
        """--vllm-<x>, read from vLLM's own environment when one is given."""
        from slimrl.engines.vllm.server_flags import interpreter, server_flags

        return {"vllm": lambda: server_flags(interpreter(words))}

    def check_machine(
        self, model: str | Path, *, cuda: bool, releases_memory: bool, kv_transfers: Sequence[str] = ()
    ) -> None:
        """On a CPU vLLM has no sleep mode, and no attention of heads of other sizes than `CPU_HEAD_SIZES`."""
        from slimrl.engines.vllm.server import check_cpu_can_serve

        if not cuda:
            check_cpu_can_serve(Path(model), releases_memory=releases_memory)

    def adapter_options(self, adapters: AdapterConfig, *, releases_memory: bool) -> dict[str, Any]:
        """Raises EngineError: vLLM servers get merged weights."""
        from slimrl.engines.protocol import EngineError

        raise EngineError("vLLM servers get LoRA adapters merged into the weights: give --lora-merge")

    def delta_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Raises EngineError: vLLM servers get whole weights."""
        from slimrl.engines.protocol import EngineError

        raise EngineError("vLLM servers get whole weights: leave --update-weight-mode delta out")

    def cpu_options(self, words: Sequence[str]) -> list[str]:
        """The defaults that `ServerProcess` adds on a machine without CUDA."""
        from slimrl.engines.vllm.server import ON_CPU, rendered

        return [*rendered(ON_CPU), *words]
