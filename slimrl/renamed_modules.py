"""Redirects import paths of earlier versions that custom scripts and functions may use.

An old path imports the new module, with one `DeprecationWarning` that names the new path. Paths in `ALIASES` are not
deprecated: they are slime's paths, which users write in flags.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence

ALIASES = {
    "slimrl.rollout.data_source": "slimrl.rollout.dataset.data_source",
    "slimrl.rollout.on_policy_distillation": "slimrl.compatibility.rollout_helpers",
    "slimrl.rollout.sglang_rollout": "slimrl.rollout.rollout_function",
}
RENAMED = {
    "slimrl.algorithms.advantages": "slimrl.algorithms.returns",
    "slimrl.algorithms.distillation": "slimrl.algorithms.losses",
    "slimrl.algorithms.kl": "slimrl.algorithms.losses",
    "slimrl.algorithms.output_log_probs": "slimrl.algorithms.log_probs",
    "slimrl.algorithms.policy_loss": "slimrl.algorithms.losses",
    "slimrl.algorithms.preference": "slimrl.algorithms.preference_losses",
    "slimrl.algorithms.reduction": "slimrl.algorithms.losses",
    "slimrl.algorithms.reward_model": "slimrl.algorithms.preference_losses",
    "slimrl.algorithms.reward_shaping": "slimrl.algorithms.estimators",
    "slimrl.algorithms.softmax_sums": "slimrl.algorithms.log_probs",
    "slimrl.algorithms.value_loss": "slimrl.algorithms.losses",
    "slimrl.arguments.dry_run.batch": "slimrl.arguments.memory",
    "slimrl.arguments.plan": "slimrl.arguments.dry_run",
    "slimrl.arguments.served_models": "slimrl.arguments.hf_config",
    "slimrl.cluster.main": "slimrl.cluster.command_line",
    "slimrl.compatibility.distillation": "slimrl.compatibility.rollout_helpers",
    "slimrl.compatibility.graders": "slimrl.compatibility.rollout_helpers",
    "slimrl.data.batch": "slimrl.data.train_batch",
    "slimrl.data.dataset_spec": "slimrl.data.prompt_format",
    "slimrl.data.image_prompts": "slimrl.data.images",
    "slimrl.data.packed": "slimrl.data.sample",
    "slimrl.data.watched_file": "slimrl.data.readers",
    "slimrl.engines.auth": "slimrl.engines.http",
    "slimrl.engines.engine_memory": "slimrl.engines.server_protocol",
    "slimrl.engines.request_stats": "slimrl.engines.protocol",
    "slimrl.engines.sglang.engine_memory": "slimrl.engines.server_protocol",
    "slimrl.hooks.base": "slimrl.hooks",
    "slimrl.hooks.rollout_hooks": "slimrl.hooks.contracts",
    "slimrl.hooks.train_hooks": "slimrl.hooks.contracts",
    "slimrl.megatron.forward": "slimrl.megatron.training.forward_step",
    "slimrl.megatron.loss": "slimrl.megatron.training.loss.policy_loss",
    "slimrl.megatron.model.layer_spec": "slimrl.megatron.model.model_builder",
    "slimrl.megatron.own_loss": "slimrl.megatron.training.step_loss",
    "slimrl.models.peft_config": "slimrl.models.adapters",
    "slimrl.processes.atomic_file": "slimrl.processes.files",
    "slimrl.processes.best_effort_files": "slimrl.processes.files",
    "slimrl.rollout.asynchronous.inflight_state": "slimrl.rollout.generation.inflight_groups",
    "slimrl.rollout.asynchronous": "slimrl.rollout",
    "slimrl.rollout.asynchronous.async_rollout": "slimrl.rollout.async_rollout",
    "slimrl.rollout.asynchronous.staleness": "slimrl.rollout.async_rollout",
    "slimrl.rollout.dataset.custom_data_source": "slimrl.rollout.dataset.data_source",
    "slimrl.rollout.engine": "slimrl.engines.protocol",
    "slimrl.rollout.errors": "slimrl.engines.protocol",
    "slimrl.rollout.evaluate": "slimrl.rollout.metrics",
    "slimrl.rollout.filter_hub.base_types": "slimrl.rollout.filter_hub.dynamic_sampling_filters",
    "slimrl.rollout.filter_hub.buffer_filters": "slimrl.rollout.dataset.data_source",
    "slimrl.rollout.generation.sample_images": "slimrl.rollout.dataset.images",
    "slimrl.rollout.output": "slimrl.rollout.rollout_function",
    "slimrl.rollout.public_data": "slimrl.rollout.dataset_prep",
    "slimrl.rollout.public_data.prepare": "slimrl.rollout.dataset_prep.prepare",
    "slimrl.rollout.rm_hub.boxed": "slimrl.rollout.rm_hub.rule_reward",
    "slimrl.rollout.rm_hub.builtin": "slimrl.rollout.rm_hub.rule_reward",
    "slimrl.rollout.rm_hub.equality": "slimrl.rollout.rm_hub.math_equivalence",
    "slimrl.rollout.rm_hub.instructions": "slimrl.rollout.rm_hub.ifeval",
    "slimrl.rollout.rm_hub.math_equivalence.text_answers": "slimrl.rollout.rm_hub.math_equivalence.normalize",
    "slimrl.rollout.rm_hub.multiple_choice": "slimrl.rollout.rm_hub.rule_reward",
    "slimrl.rollout.rm_hub.overlap": "slimrl.rollout.rm_hub.rule_reward",
    "slimrl.rollout.rm_hub.registry": "slimrl.rollout.rm_hub.rule_reward",
    "slimrl.rollout.rm_hub.rule_graders": "slimrl.rollout.rm_hub.rule_reward",
    "slimrl.rollout.rm_hub.rules": "slimrl.rollout.rm_hub.rule_reward",
    "slimrl.rollout.rm_hub.server_pool": "slimrl.rollout.rm_hub.remote",
    "slimrl.rollout.sampling": "slimrl.engines.protocol",
    "slimrl.rollout.stop_strings": "slimrl.rollout.generation.multi_turn",
    "slimrl.rollout.stop_tokens": "slimrl.rollout.generation.multi_turn",
    "slimrl.rollout.turns": "slimrl.rollout.generation.multi_turn",
    "slimrl.sglang": "slimrl.engines.sglang",
    "slimrl.sglang.client": "slimrl.engines.sglang.client",
    "slimrl.sglang.cpu": "slimrl.engines.sglang.cpu_patches",
    "slimrl.sglang.errors": "slimrl.engines.protocol",
    "slimrl.tiny.task": "slimrl.tiny.tasks",
    "slimrl.tiny.tokenizer": "slimrl.tiny.models",
    "slimrl.tiny.vision_task": "slimrl.tiny.pictures",
    "slimrl.weights.atomic_dir": "slimrl.processes.files",
    "slimrl.weights.peft_folder": "slimrl.weights.adapters",
    "slimrl.weights.stacked_experts": "slimrl.weights.hf_checkpoint",
}

# module -> former names of its functions that custom code may import, and their new names
RENAMED_NAMES = {
    "slimrl.rollout.generation.multi_turn": {
        "append_observation": "append_tool_output",
        "converse": "multi_turn_generate",
    },
}


def current_name(module: str, name: str) -> str:
    """The new name of `module.name`, with a `DeprecationWarning`; for the `__getattr__` of such a module.

    Raises AttributeError for a name that is not in the table.
    """
    new = RENAMED_NAMES[module].get(name)
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} is now {new}: import it by that name", DeprecationWarning, stacklevel=3)
    return new


def current_path(module: str) -> str:
    """The new path of `module`; `module` itself if it is in neither table."""
    return ALIASES.get(module) or RENAMED.get(module, module)


class RenamedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the two tables and imports their successors."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """None for names in neither table."""
        return importlib.machinery.ModuleSpec(name, self) if name in RENAMED or name in ALIASES else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Imports the successor and registers it under the old name in `sys.modules`, which importlib returns."""
        old = module.__name__
        new = current_path(old)
        if old in RENAMED:
            warnings.warn(f"{old} is now {new}: import it from there", DeprecationWarning, stacklevel=2)
        sys.modules[old] = importlib.import_module(new)


def install() -> None:
    """Puts the finder first on `sys.meta_path`, once per process; it handles only the names in the tables."""
    if not any(isinstance(finder, RenamedModules) for finder in sys.meta_path):
        sys.meta_path.insert(0, RenamedModules())
