"""Any number of engines with SGLang's HTTP API in one process, which answer every call immediately.

    python benchmarks/instant_engines.py --engines 512 --response-tokens 16

Prints one line of JSON, {"addresses": [...]}, when they listen on free ports of this machine. Each engine has a port
and a weight version; a generation has prepared tokens and log-probabilities. Weight updates from disk succeed at once.
`GET /benchmark/counts` of any engine answers the number of calls to all of them by path. Started by scale.py; exits
when its stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

import orjson
import uvloop
from instant_server import body_end, reply

from slimrl.engines.sglang.external_server_check import NEEDED_PATHS

HOST = "127.0.0.1"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
ABSENT = ("/begin_weight_update", "/end_weight_update")  # as in SGLang 0.5.20
DONE = reply(b'{"success":true}')


class Fleet:
    """What all engines have in common: the model, prepared answers, and the count of calls."""

    def __init__(self, model_path: str, response_tokens: int) -> None:
        self.counts: Counter[str] = Counter()
        self.model_path = model_path
        self._tokens = response_tokens
        self._generations: dict[str, bytes] = {}

    def generation(self, version: str) -> bytes:
        """The HTTP answer of every generation by the weights `version`."""
        if version not in self._generations:
            ids = [5 + i % 100 for i in range(self._tokens)]
            meta = {
                "id": "instant",
                "finish_reason": {"type": "length", "length": self._tokens},
                "prompt_tokens": 8,
                "completion_tokens": self._tokens,
                "cached_tokens": 0,
                "weight_version": version,
                "e2e_latency": 0.001,
                "output_token_logprobs": [[-5.0, token, None] for token in ids],
            }
            self._generations[version] = reply(orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta}))
        return self._generations[version]


class Engine:
    """One engine; it has a weight version."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.fleet, self.number, self.version = fleet, number, "default"

    def answer(self, path: str, body: bytes) -> bytes:
        """The HTTP answer of one call."""
        self.fleet.counts[path] += 1
        if path == "/generate":
            return self.fleet.generation(self.version)
        if path in ABSENT:
            return NOT_FOUND
        if path == "/update_weight_version":
            self.version = json.loads(body)["new_version"]
        known: dict[str, Any] = {
            "/server_info": self._server(),
            "/get_server_info": self._server(),
            "/model_info": self._model(),
            "/get_model_info": self._model(),
            "/openapi.json": {"paths": dict.fromkeys(NEEDED_PATHS, {})},
            "/v1/models": {"data": [{"id": self.fleet.model_path}]},
            "/v1/loads": {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "timestamp": time.time()}]},
            "/benchmark/counts": dict(self.fleet.counts),
        }
        return reply(orjson.dumps(known[path])) if path in known else DONE

    def _server(self) -> dict[str, Any]:
        return {
            "model_path": self.fleet.model_path,
            "served_model_name": "instant",
            "tokenizer_path": self.fleet.model_path,
            "version": "0.5.20",
            "tp_size": 1,
            "dp_size": 1,
            "startup_time": 1.0,
            "random_seed": self.number,
            "disable_radix_cache": True,
            "status": "ready",
        }

    def _model(self) -> dict[str, Any]:
        return {"model_path": self.fleet.model_path, "is_generation": True, "weight_version": self.version}


class Connection(asyncio.Protocol):
    """One keep-alive connection to an engine; answers the requests in order."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if data.startswith(b"PRI "):  # the router asks whether a server speaks gRPC
            self._transport.close()
            return
        self._received += data
        while 0 < (end := body_end(self._received)) <= len(self._received):
            message, self._received = self._received[:end], self._received[end:]
            path = message.split(b" ", 2)[1].split(b"?", 1)[0].decode()
            self._transport.write(self._engine.answer(path, message.partition(b"\r\n\r\n")[2]))


async def serve(engines: int, model_path: str, response_tokens: int) -> None:
    """Serves until standard input ends."""
    loop, fleet, servers = asyncio.get_running_loop(), Fleet(model_path, response_tokens), []
    for number in range(engines):
        engine = Engine(fleet, number)
        servers.append(await loop.create_server(lambda engine=engine: Connection(engine), HOST, 0, backlog=256))
    addresses = [f"{HOST}:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(json.dumps({"addresses": addresses}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    for server in servers:
        server.close()


def main() -> None:
    """Reads the flags and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--model-path", default="instant")
    parser.add_argument("--response-tokens", type=int, default=16)
    options = parser.parse_args()
    uvloop.run(serve(options.engines, options.model_path, options.response_tokens))


if __name__ == "__main__":
    main()
