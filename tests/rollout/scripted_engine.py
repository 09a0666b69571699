"""An engine whose next token is a function of all tokens before it, and hooks that record the samples of a full run."""

from __future__ import annotations

import asyncio
import zlib
from array import array

from slimrl.engines.protocol import Generation

LIMIT = 30  # tokens of the longest response

END_IN = 12  # a response ends after about this many tokens


def draw(tokens: list[int], seed: int) -> int:
    """The hash that decides the token after `tokens`."""
    return zlib.crc32(array("I", tokens).tobytes(), seed)


def uninterrupted(prompt: list[int], seed: int, limit: int) -> tuple[list[int], bool]:
    """The response of an uninterrupted engine, and whether it ends by itself."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < limit:
        number = draw(tokens, seed)
        tokens.append(number % 256)
        if number % END_IN == 0:
            return tokens[len(prompt) :], True
    return tokens[len(prompt) :], False


class ScriptedEngine:
    """Implements EngineClient: a token per turn of the event loop; an abort returns what there is.

    A token's log-probability encodes the weights that sampled it: -(version + a fraction from the hash).
    """

    def __init__(self, gpus: int = 1000) -> None:
        self.version = 0
        self.requests = 0
        self.in_flight = 0
        self._aborts = 0
        self._gpus = asyncio.Semaphore(gpus)

    async def generate(self, input_ids, sampling_params, session_id=None):
        aborts, version = self._aborts, self.version
        tokens, new, log_probs = list(input_ids), [], []
        self.requests += 1
        self.in_flight += 1
        try:
            async with self._gpus:
                while len(new) < sampling_params["max_new_tokens"]:
                    if self._aborts != aborts:
                        return Generation(new, log_probs, "abort", str(version) if new else "")
                    number = draw(tokens, sampling_params["sampling_seed"])
                    tokens.append(number % 256)
                    new.append(number % 256)
                    log_probs.append(-(version + number % 1000 / 1100))
                    if number % END_IN == 0:
                        return Generation(new, log_probs, "stop", str(version))
                    await asyncio.sleep(0)
                return Generation(new, log_probs, "length", str(version))
        finally:
            self.in_flight -= 1

    async def abort_all(self):
        self._aborts += 1
        while self.in_flight:
            await asyncio.sleep(0)


async def score(args, sample):
    """A reward that is sometimes equal for a full group."""
    for _ in range(sample.index % 5):
        await asyncio.sleep(0)
    return float(sum(sample.tokens) % 3 == 0)


async def score_group(args, samples):
    """The same for a full group, of which no sample may be missing."""
    assert len(samples) == args.n_samples_per_prompt
    return [await score(args, sample) for sample in samples]


def book(args, all_groups, data_source):
    """Records every scored group."""
    args.custom["scored"].append([group[0].group_index for group in all_groups])


def scripted(make_args, **changes):
    """Flags of a run over this engine, with the reward and the hook of this module."""
    values = {
        "custom_rm_path": f"{__name__}.score",
        "rm_type": None,
        "rollout_all_samples_process_path": f"{__name__}.book",
        "rollout_max_response_len": LIMIT,
        "sglang_options": {"enable_deterministic_inference": True},
        "rollout_shuffle": True,
    }
    return make_args(**{**values, **changes})
