"""SGLang's row in the table of engines (`engines.backend`)."""

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
        ServerInspector,
    )
    from slimrl.models.adapters import AdapterConfig


class SglangBackend:
    """Implements `EngineBackend`."""

    title = "SGLang"
    packages = ("sglang", "sglang_router")

    @property
    def server(self) -> ServerFactory:
        """One server, or its part on a node."""
        from slimrl.engines.sglang.server import ServerProcess

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
        """Weights, memory and load of one server."""
        from slimrl.engines.sglang.control import ServerControl

        return ServerControl

    @property
    def inspect(self) -> ServerInspector:
        """Checks whether an external SGLang server can serve the run."""
        from slimrl.engines.sglang.external_server_check import inspect

        return inspect

    def router_options(
        self, given: Mapping[str, Any], *, request_timeout_s: int, conversations: bool, disaggregated: bool = False
    ) -> dict[str, Any]:
        """See `router.router_options`."""
        from slimrl.engines.sglang.router import router_options

        return router_options(
            given, request_timeout_s=request_timeout_s, conversations=conversations, disaggregated=disaggregated
        )

    def flags(self, words: Sequence[str]) -> PassthroughTables:
        """--sglang-<x> and --router-<x>, read from the installed packages when one is given."""
        from slimrl.engines.sglang.server_args import router_flags, server_flags

        return {"sglang": server_flags, "router": router_flags}

    def check_machine(
        self,
        model: str | Path,
        *,
        cuda: bool,
        releases_memory: bool,
        kv_transfers: Sequence[str] = (),
        mooncake: bool = False,
        draft_branches: int = 1,
        python: str | None = None,
    ) -> None:
        """Both kinds of machines serve every model, a CPU with chains of drafts; see `kv_transfer.check_installed`."""
        from slimrl.engines.protocol import EngineUnsupportedError
        from slimrl.engines.sglang.kv_transfer import check_installed, check_mooncake

        if not cuda and draft_branches > 1:
            raise EngineUnsupportedError(
                f"--sglang-speculative-eagle-topk {draft_branches} (speculative_eagle_topk of a group) makes trees of"
                " drafts, for which SGLang has no kernels on a CPU: give 1, which makes chains"
            )
        if mooncake:
            check_mooncake()
        for transfer in kv_transfers:
            check_installed(transfer, cuda=cuda)

    def adapter_options(self, adapters: AdapterConfig, *, releases_memory: bool) -> dict[str, Any]:
        """See `server_args.adapter_options`."""
        from slimrl.engines.sglang.server_args import adapter_options

        return adapter_options(adapters, releases_memory=releases_memory)

    def delta_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `server_args.delta_options`."""
        from slimrl.engines.sglang.server_args import delta_options

        return delta_options(given)

    def point_to_point_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """See `server_args.point_to_point_options`."""
        from slimrl.engines.sglang.server_args import point_to_point_options

        return point_to_point_options(given)

    def routing_options(self) -> dict[str, Any]:
        """SGLang's switch."""
        return {"enable_return_routed_experts": True}

    def cpu_options(self, words: Sequence[str]) -> list[str]:
        """See `server_args.with_defaults`."""
        from slimrl.engines.sglang.server_args import with_defaults

        return with_defaults(words)
