"""Which server the router picks for a request, where the user did not say (`--router-policy`).

The router's own choice, `cache_aware`, looks at the tokens: samples of one prompt go to one server, and a conversation
stays where its first turns were computed as long as its history only grows and no server has far more to do than
another. It does not read the session of a request. `manual` does: the first request of a session goes to the server
with the least to do, and all others follow it. So that is what runs are given whose samples may be conversations, which
are those with a generate function of the user's. Called where the router is started.
"""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments

BY_SESSION: dict[str, Any] = {"policy": "manual", "assignment_mode": "min_load"}


def routing_options(args: Arguments) -> dict[str, Any]:
    """Options of the router, by its own names; the user's go before them."""
    datasets = args.eval_datasets or []
    converses = args.custom_generate_function_path or any(one.custom_generate_function_path for one in datasets)
    return dict(BY_SESSION) if converses and "policy" not in args.router_options else {}
