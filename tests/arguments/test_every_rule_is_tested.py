"""Every validation rule has cases in one of the files `test_rules_of_*`; a rule without a test is named here."""

import ast
import importlib
from pathlib import Path

from slimrl.arguments import validation

# rules with individually written tests: file -> names of rules; the other files have a table, `CASES`
WRITTEN_OUT = {
    "asynchrony": (
        "asynchrony_has_its_program continuous_generation_is_alone weight_updates_keep_up"
        " in_flight_updates_are_supported async_excludes_colocate"
    ),
    "charts": ("charts_have_their_switch timeline_is_on wandb_is_installed prometheus_port_is_free ports_are_apart"),
    "colocation": "offload_is_synchronous offload_is_said_once",
    "own_functions": (
        "custom_loss_has_its_function parts_of_the_policy_loss_have_one custom_model_is_one written_weights_are_files"
    ),
    "recomputation": (
        "recomputation_is_complete recomputed_units_fill_the_stages recomputed_modules_are_there"
        " saved_activations_have_gpus"
    ),
    "rewards": "reward_service_has_an_address reward_model_is_complete dict_rewards_have_a_key",
}


def tables() -> set[str]:
    """Names of all rules that have a row in a table."""
    found = [value for value in vars(validation).values() if isinstance(value, tuple)]
    return {rule.__name__ for table in found for rule in table if callable(rule)}


def test_every_validation_rule_is_in_a_table():
    written = set()
    for path in Path(validation.__file__).parent.rglob("[!_]*.py"):
        for node in ast.parse(path.read_text()).body:
            takes = [argument.arg for argument in node.args.args] if isinstance(node, ast.FunctionDef) else []
            if takes == ["args", "context"] and not node.name.startswith("_"):
                written.add(node.name)
    assert written == tables()


def test_every_validation_rule_is_tested():
    rules = tables()
    assert len(rules) > 100
    tested = {name for names in WRITTEN_OUT.values() for name in names.split()}
    for path in Path(__file__).parent.glob("test_rules_of_*.py"):
        module = importlib.import_module(f"tests.arguments.{path.stem}")
        tested |= {*getattr(module, "CASES", ()), *getattr(module, "TESTED_APART", ())}
    assert tested == rules
