"""The sample that a function of the user's makes right now, for helpers that are given neither engine nor sample.

`slime.utils.http_utils.post` is such a helper: it is told a URL and a payload. One context variable per task, set by
the sample maker around each call of the function, and so seen by every task that the function begins.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data import version_spans
from slimrl.data.sample import Sample
from slimrl.rollout.engine import EngineClient

_headers: contextvars.ContextVar[tuple[str, dict[str, str]]] = contextvars.ContextVar("slimrl_router_headers")
_current: contextvars.ContextVar[Making] = contextvars.ContextVar("slimrl_making")


def router_url(args: Arguments) -> str:
    """Where functions of the user's find the engines, without a path."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def begin_calls(args: Arguments) -> None:
    """From now on calls of this task to the run's router bring its key along, where there is one."""
    key = args.sglang_options.get("api_key")
    _headers.set((router_url(args), {"Authorization": f"Bearer {key}"} if key else {}))


def own_headers(url: str) -> dict[str, str]:
    """What a call to `url` must bring along: nothing where that is no address of the run's router."""
    own, headers = _headers.get(("", {}))
    return headers if own and url.startswith(f"{own}/") else {}


@dataclasses.dataclass(frozen=True)
class Making:
    """`router_url` is where the function believes the engines to be; `stopped` says whether the rollout is full.

    `continue_sample(sample, sampling_params)` is the built-in generation. `before` is the sample as the function got
    it, and `versions` are the weights of the answers since then.
    """

    router_url: str
    engine: EngineClient
    stopped: Callable[[], bool]
    continue_sample: Callable[[Sample, dict[str, Any]], Awaitable[None]]
    session_id: str | None
    before: Sample
    versions: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def current(cls) -> Making | None:
        """Of the sample that this task belongs to; None outside of a function that generates one."""
        return _current.get(None)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Within the block it is the current one of this task, and of those that begin in it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    async def ask(self, url: str, payload: dict[str, Any]) -> Any:
        """What the engines answer to a POST to `url`, which begins with `router_url`."""
        answer = await self.engine.ask(url.removeprefix(self.router_url), payload, self.session_id)
        meta = answer.get("meta_info") if isinstance(answer, Mapping) else None
        if isinstance(meta, Mapping) and meta.get("weight_version"):
            self.versions.append(str(meta["weight_version"]))
        return answer

    def tell_versions(self, sample: Sample) -> None:
        """Notes on a finished sample which weights answered, where the function noted nothing itself.

        Which of them drew which token is only known where all answers came from the same.
        """
        if not self.versions or len(sample.weight_versions) > len(self.before.weight_versions):
            return
        kept = sample.tokens[: len(self.before.tokens)] == self.before.tokens
        sample.weight_versions = [*(self.before.weight_versions if kept else []), *self.versions]
        sample.version_spans = [list(span) for span in self.before.version_spans] if kept else []
        if len(set(self.versions)) == 1:
            known = sum(count for _, count in sample.version_spans)
            version_spans.add(sample.version_spans, self.versions[0], sample.response_length - known)
