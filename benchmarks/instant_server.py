"""A server with SGLang's HTTP API that answers every generation immediately with prepared bytes.

    python benchmarks/instant_server.py --port 21000 --response-tokens 512

Prints "ready" when it listens. Serves the endpoints that the router uses to add and probe a server, and `/generate`
with log-probabilities in the format of SGLang 0.5.20. `raw_load` is its counterpart: a client that only counts
responses. Both cost about 25 microseconds per request. Started by rollout_driver.py; exits when its stdin closes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time

import orjson
import uvloop

WORDS = ["so", "we", "add", "both", "numbers", "and", "carry", "one", "which", "gives", "twice", "as", "half", "left"]
INFO = {
    "model_path": "instant",
    "tokenizer_path": "instant",
    "served_model_name": "instant",
    "is_generation": True,
    "weight_version": "1",
    "tp_size": 1,
    "dp_size": 1,
    "version": "0.5.20",
    "status": "ready",
}


def generation(response_tokens: int) -> bytes:
    """One answer of `/generate` with `return_logprob`: 4 characters a token, log-probabilities of 17 digits."""
    draw = random.Random(1)
    text = " ".join(draw.choice(WORDS) for _ in range(response_tokens)) + " \\boxed{\\frac{21}{2}}"
    token_ids = [1000 + 37 * i % 150_000 for i in range(response_tokens)]
    log_probs = [-draw.expovariate(2.0) for _ in range(response_tokens)]
    return orjson.dumps(
        {
            "text": text,
            "output_ids": token_ids,
            "meta_info": {
                "id": "8a4c1b2f0d9e4b7f8f2f6d3f5a1c7e90",
                "finish_reason": {"type": "stop", "matched": token_ids[-1]},
                "prompt_tokens": 64,
                "weight_version": "1",
                "total_retractions": 0,
                "input_token_logprobs": [],
                "output_token_logprobs": [
                    [log_prob, token_id, None] for log_prob, token_id in zip(log_probs, token_ids, strict=True)
                ],
                "completion_tokens": response_tokens,
                "cached_tokens": 0,
                "cached_tokens_details": None,
                "e2e_latency": 0.0012345678,
            },
        }
    )


def reply(body: bytes) -> bytes:
    """A whole HTTP answer with this body."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def body_end(received: bytes) -> int:
    """The end of the first message in `received`, by its headers; 0 while they are incomplete."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return 0
    head = received[:end].lower()
    place = head.find(b"content-length:")
    return end + 4 + (int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0)


class Connection(asyncio.Protocol):
    """One keep-alive connection; answers every request in order, regardless of its content."""

    def __init__(self, generation_reply: bytes, info_reply: bytes) -> None:
        self._generation_reply = generation_reply
        self._info_reply = info_reply
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._received += data
        while 0 < (end := body_end(self._received)) <= len(self._received):
            generates = self._received.startswith(b"POST /generate")
            self._received = self._received[end:]
            self._transport.write(self._generation_reply if generates else self._info_reply)


class RawConnection(asyncio.Protocol):
    """Sends `request` again as soon as its response is complete, until `left` is used up."""

    def __init__(self, request: bytes, left: list[None], finished: asyncio.Semaphore) -> None:
        self._request = request
        self._left = left
        self._finished = finished
        self._received = b""
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = transport

    def send(self) -> None:
        """Sends one request, if any is left."""
        if self._left:
            self._left.pop()
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._missing:
            self._missing -= len(data)
        else:
            self._received += data
            if not (end := body_end(self._received)):
                return
            self._missing = end - len(self._received)
            self._received = b""
        if self._missing == 0:
            self._finished.release()
            self.send()


async def raw_load(host: str, port: int, body: bytes, count: int, connections: int) -> float:
    """Seconds that `count` generations take, with one request in flight on each connection."""
    head = f"POST /generate HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    request = head.encode() + b"\r\n\r\n" + body
    loop, left, finished = asyncio.get_running_loop(), [None] * count, asyncio.Semaphore(0)
    opened = [
        await loop.create_connection(lambda: RawConnection(request, left, finished), host, port)
        for _ in range(connections)
    ]
    started = time.perf_counter()
    for _, connection in opened:
        connection.send()
    for _ in range(count):
        await finished.acquire()
    seconds = time.perf_counter() - started
    for transport, _ in opened:
        transport.close()
    return seconds


async def serve(port: int, response_tokens: int) -> None:
    """Serves until standard input ends."""
    generation_reply, info_reply = reply(generation(response_tokens)), reply(orjson.dumps(INFO))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(generation_reply, info_reply), "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def main() -> None:
    """Reads the flags and serves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--response-tokens", type=int, default=512)
    options = parser.parse_args()
    uvloop.run(serve(options.port, options.response_tokens))


if __name__ == "__main__":
    main()
