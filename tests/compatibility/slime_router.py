"""A fake router and other services, and rollouts of single samples that call them."""

from __future__ import annotations

import asyncio

from aiohttp import web

from slimrl.engines.sglang.client import RouterClient
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.rollout_generator import RolloutGenerator


class Router:
    """A fake router or other service; answers each path from `answers` and records the requests."""

    def __init__(self, answers):
        self.answers = {path: list(given) for path, given in answers.items()}
        self.asked = []

    async def __call__(self, request):
        path = request.path
        self.asked.append((path, await request.json() if request.can_read_body else None, dict(request.headers)))
        status, answer = self.answers[path].pop(0) if len(self.answers[path]) > 1 else self.answers[path][0]
        return (
            web.json_response(answer, status=status)
            if not isinstance(answer, str)
            else web.Response(status=status, text=answer, headers={"Location": "/elsewhere"} if status == 302 else {})
        )


def serve(router, body):
    async def served():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", router)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            return await body(site._server.sockets[0].getsockname()[1])
        finally:
            await runner.cleanup()

    return asyncio.run(served())


def answer(tokenizer, text, reason="stop", version="2"):
    ids = tokenizer(text)["input_ids"]
    meta = {"id": "1", "finish_reason": {"type": reason}, "weight_version": version}
    meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
    return {"text": text, "output_ids": ids, "meta_info": meta}


def rolled(tokenizer, make_args, monkeypatch, answers, function, stop=False, **changes):
    """Runs one rollout of one sample with `function`; returns the sample and the requests to the router."""
    for module in ("slimrl.compatibility.rollout_helpers._cached_tokenizer",):
        monkeypatch.setattr(module, lambda path, trusted: tokenizer)
    router = Router(answers)

    async def body(port):
        args = make_args(
            **{
                "custom_generate_function_path": function,
                "custom_rm_path": "tests.rollout.scripted_engine.score",
                "rollout_batch_size": 1,
                "n_samples_per_prompt": 1,
                "sglang_router_ip": "127.0.0.1",
                "sglang_router_port": port,
                "custom": {"most_calls_that_count": 1},
                "hf_checkpoint": "model",
                **changes,
            }
        )
        source = RolloutDataSource(args, tokenizer)
        client = RouterClient(f"http://127.0.0.1:{port}", [], concurrency=4, request_timeout_s=10, retry_timeout_s=0.1)
        async with client:
            generator = RolloutGenerator.from_args(args, tokenizer, client)
            try:
                return (await generator.generate_rollout(0, source)).groups[0][0]
            finally:
                generator.close()

    return serve(router, body), router.asked
