"""A server that speaks SGLang's HTTP and answers every generation at once with bytes that were made beforehand.

    python benchmarks/instant_server.py --port 21000 --response-tokens 512

Prints "ready" when it listens. Serves what the router asks of a server when it is added and probed, and `/generate`
with log-probabilities, as SGLang 0.5.20 writes them. Started by rollout_driver.py; ends when its standard input does.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

import orjson
import uvloop

ANSWER_TEXT = "We add the two numbers and carry the one, which gives the sum that was asked for: \\boxed{42}"
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
    """One answer of `/generate` with `return_logprob`; the last token ends the response."""
    token_ids = [1000 + 37 * i % 150_000 for i in range(response_tokens)]
    log_probs = [-((i * 2654435761) % 2**32) / 2**31 for i in range(response_tokens)]
    return orjson.dumps(
        {
            "text": ANSWER_TEXT,
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


class Connection(asyncio.Protocol):
    """One kept connection: requests are answered in turn, whatever they say."""

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
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            length = 0
            if (place := head.find(b"content-length:")) >= 0:
                length = int(head[place + 15 :].split(b"\r\n", 1)[0])
            if len(self._received) < end + 4 + length:
                return
            self._received = self._received[end + 4 + length :]
            self._transport.write(self._generation_reply if head.startswith(b"post /generate") else self._info_reply)


async def serve(port: int, response_tokens: int) -> None:
    """Serves until standard input ends."""
    generation_reply, info_reply = reply(generation(response_tokens)), reply(orjson.dumps(INFO))
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Connection(generation_reply, info_reply), "127.0.0.1", port, backlog=4096
    )
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
