"""The namespace of flags stops at the boundary (docs/architecture.md, Decisions): which functions may take it."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.test_architecture import ROOT, SOURCES, imports_of

# Functions that may take the full namespace of flags. All others take groups of flags or their own config.
EDGE = {"arguments", "cluster"}  # command lines and actors
BUILDERS = {  # called once by an actor or a tool: they pass every component its part
    "megatron/checkpoint/state.py": {"model_blueprint"},
    "megatron/training/critic.py": {"Critic.__init__", "critic_arguments"},
    "megatron/training/critic_trainer.py": {"CriticTrainer.__init__"},
    "megatron/training/trained_model.py": {"TrainedModel.build"},
    "megatron/training/trainer.py": {
        "MegatronTrainer.__init__",
        # its steps
        "MegatronTrainer._load_policy",
        "MegatronTrainer._memory_of_models",
        "MegatronTrainer._report_of_memory",
        "MegatronTrainer._parts_of_rollouts",
        "MegatronTrainer._critic_of_same_ranks",
        "MegatronTrainer._open_saver",
        "MegatronTrainer._open_exporter",
        "_warn_of_kernels",
        "_of_model",
        "_build_stages",
    },
    "observability/run_log.py": {"RunLog.open"},
    "rollout/dataset/data_source.py": {"open_data_source"},
    "weights/update/adapter_updater.py": {"create_updater"},
    "weights/update/weight_updater.py": {"WeightUpdater.create"},
}
CONFIGS = {"from_args", "for_training", "for_evaluation"}  # class methods that build configs: see the test below
CONTRACTS = {  # custom functions and classes receive it, and so do functions that they may call or name
    "hooks/contracts.py": None,  # all of them
    "compatibility/rollout_helpers.py": {
        "GenerateState.__init__",
        "generate",
        "get_model_url",
        "post_process_rewards",
        "reward_func",
    },
    "data/sample.py": {
        "SlimeSample.get_reward_value",
        "SlimeSample.append_response_tokens",
        "SlimeSample.update_from_meta_info",
    },
    "rollout/dataset/data_source.py": {"RolloutDataSource.__init__", "pop_first"},
    "rollout/filter_hub/dynamic_sampling_filters.py": None,
    "rollout/rm_hub/scorer.py": {"async_rm", "batched_async_rm"},
    "rollout/rollout_function.py": {"generate_rollout"},
    "rollout/sft_rollout.py": {"generate_rollout"},
    "rollout/preference_rollout.py": {"generate_rollout"},
}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def functions_of(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its name, `Class.name` in a class."""
    tree = tree_of(path)
    owners = {child: node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (f"{owners[node]}.{node.name}" if node in owners else node.name), node


def takes_everything(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a parameter is the full namespace; a group of flags is not, nor is the argument for hooks."""
    for parameter in (*function.args.args, *function.args.kwonlyargs):
        kind = ast.unparse(parameter.annotation).strip("'") if parameter.annotation is not None else ""
        is_group = kind.endswith("Arguments") and kind not in ("Arguments", "RunArguments")
        kind = kind.split(" | ")[0]
        is_whole = kind == "Arguments" or (kind == "RunArguments" and parameter.arg != "hook_args")
        if is_whole or (parameter.arg == "args" and not is_group):
            return True
    return False


def allowed(path: str, name: str) -> bool:
    if path.split("/")[0] in EDGE:
        return True
    own = BUILDERS.get(path, set()) | (CONTRACTS.get(path, set()) or set())
    return name in own or CONTRACTS.get(path, set()) is None


def whole(path: Path) -> list[str]:
    """The functions of a file that take the full namespace."""
    foreign = ("__torch_function__",)  # its `args` are torch's
    found = [(name, function) for name, function in functions_of(path) if function.name not in foreign]
    return [name for name, function in found if takes_everything(function)]


def below(path: Path) -> str:
    return path.relative_to(ROOT / "slimrl").as_posix()


def test_namespace_of_flags_stops_at_the_boundary():
    found = [
        f"{below(path)}: {name}"
        for path in SOURCES
        for name in whole(path)
        if not allowed(below(path), name) and name.split(".")[-1] not in CONFIGS
    ]
    assert not found, "take a group of flags (slimrl.arguments.flags), a config or plain values instead of all flags"


def test_list_of_namespace_receivers_is_accurate():
    for path, names in (BUILDERS | CONTRACTS).items():
        found = whole(ROOT / "slimrl" / path)
        assert found and (names is None or names <= set(found)), f"{path} no longer needs to be listed"


def test_configs_are_built_from_the_namespace_only_at_the_boundary():
    functions = [(below(path), name, function) for path in SOURCES for name, function in functions_of(path)]
    made = {name for _, name, function in functions if function.name in CONFIGS and takes_everything(function)}
    for path, name, function in functions:
        if not allowed(path, name) and name not in made:
            called = {ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
            assert not called & made, f"{path}: {name} makes a config of all flags: have it handed over"


def test_namespace_for_hooks_is_only_passed_on():
    attributes = [(below(path), node) for path in SOURCES for node in attributes_of(path)]
    read = [f"{path}: {ast.unparse(node)}" for path, node in attributes if is_for_hooks(node.value)]
    assert not read, "hook_args is for custom functions: take the value as a parameter"


def test_no_component_stores_the_namespace():
    apart = {path for path in SOURCES if below(path).split("/")[0] in EDGE or below(path) in CONTRACTS}
    kept = [
        f"{below(path)}: {ast.unparse(node)}"
        for path in SOURCES
        if path not in apart
        for node in attributes_of(path)
        if node.attr in ("args", "_args") and isinstance(node.ctx, ast.Store)
    ]
    assert not kept, "keep a group of flags, a config or what is read of it"


def test_run_needs_neither_dry_run_nor_validation():
    apart = ("slimrl.arguments.dry_run", "slimrl.arguments.validation")
    needed = [
        f"{below(path)}: {name}"
        for path in SOURCES
        if not below(path).startswith("arguments/") and below(path) != "cluster/command_line.py"
        for name in imports_of(path)
        if name.startswith(apart)
    ]
    assert not needed, "move the arithmetic that both need to a module of its own"


def attributes_of(path: Path) -> list[ast.Attribute]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)]


def is_for_hooks(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("hook_args", "_hook_args")
