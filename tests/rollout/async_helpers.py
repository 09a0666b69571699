"""Custom functions for fully asynchronous runs, and fully asynchronous generation one step at a time."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from slimrl.data.sample import SampleStatus
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.filter_hub.dynamic_sampling_filters import DynamicFilterOutput
from slimrl.rollout.rollout_generator import RolloutGenerator
from tests.rollout.test_async_rollout import ContinuingEngine

HERE = "tests.rollout.async_helpers"


async def run_loop(count: int) -> None:
    """Runs `count` iterations of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def async_generation(args, tokenizer, engine=None, source=None, requests=1000):
    """A generator, whose fully asynchronous generation `set_weight_version` starts, its data source and its engine."""
    source = source or RolloutDataSource(args, tokenizer)
    engine = engine or ContinuingEngine(1000, 0, 0)
    generator = RolloutGenerator.from_args(args, tokenizer, engine)
    generator.start_async(source, lambda: requests)
    try:
        yield generator, source, engine
    finally:
        await generator.end()


async def fails_intermittently(args, sample):
    """A reward that fails for one group in seven."""
    await run_loop(sample.index % 5)
    if sample.group_index % 7 == 3:
        raise ValueError("mine")
    return float(sample.index % 2)


def raises_at_six(args, samples, **options):
    """A filter that fails for one group."""
    if samples[0].group_index == 6:
        raise RuntimeError("boom")
    return DynamicFilterOutput(True)


async def attaches(args, sample):
    """A reward that attaches common kinds of values to the sample."""
    sample.my_note = "an attribute that is no field"
    sample.metadata |= {"score": np.float64(0.5), "count": np.int32(3), "parts": (np.float32(0.25), "a")}
    return np.float64(1.0)


async def leaves_an_object(args, sample):
    """A reward that attaches an unserializable object to the sample."""
    sample.metadata["scores"] = [1.0, {"all": np.ones(3)}]
    return 1.0


async def changes_in_place(args, sample, sampling_params):
    """A generate function that changes the sample's lists and dicts in place."""
    for column in (sample.tokens, sample.loss_mask, sample.rollout_log_probs):
        column[0] = 77
    sample.version_spans[0][0], sample.weight_versions[0] = "5", "5"
    sample.metadata["seen"]["by"].append(sample.index)
    sample.status = SampleStatus.COMPLETED
    return sample


def notes_its_rollout(args, sample, rollout_id, evaluation):
    """A sample hook."""
    sample.metadata["begun_for"] = rollout_id
