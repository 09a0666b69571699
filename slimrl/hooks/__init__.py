"""The doors for user code: the written contract of every `--...-path` flag, and how a path becomes a function.

`of_rollouts` has the contracts around generation, `resolving` finds functions and checks them.
"""

from slimrl.hooks.contract import Hook, HookError, HookFailedError
from slimrl.hooks.of_rollouts import (
    AllSamplesProcess,
    BufferFilter,
    ConvertSamples,
    CustomGenerate,
    CustomReward,
    DataSource,
    DynamicSamplingFilter,
    EvalRolloutLog,
    GroupReward,
    OwnDataSource,
    RewardPostProcess,
    RolloutFunction,
    RolloutLog,
    SampleFilter,
    SampleHook,
)
from slimrl.hooks.resolving import (
    accepted,
    accepts_keyword,
    expectation,
    naming,
    own_path,
    resolve,
    resolve_data_source,
)

__all__ = [
    "AllSamplesProcess",
    "BufferFilter",
    "ConvertSamples",
    "CustomGenerate",
    "CustomReward",
    "DataSource",
    "DynamicSamplingFilter",
    "EvalRolloutLog",
    "GroupReward",
    "Hook",
    "HookError",
    "HookFailedError",
    "OwnDataSource",
    "RewardPostProcess",
    "RolloutFunction",
    "RolloutLog",
    "SampleFilter",
    "SampleHook",
    "accepted",
    "accepts_keyword",
    "expectation",
    "naming",
    "own_path",
    "resolve",
    "resolve_data_source",
]
