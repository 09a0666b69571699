"""The worst difference of every algorithm from an independent reference: the table of docs/algorithms.md.

    python benchmarks/accuracy.py [--row TEXT ...] [--workers 2]
    SLIMRL_TEST_ACCURACY=FILE bash scripts/test.sh --all; python benchmarks/accuracy.py --read FILE

Runs the tests that compare slimrl with float64, transformers or a formula (about 25 minutes on 2 idle cores), and
prints for each row the worst of what they compared, in all layouts and steps: relative differences of the loss,
gradient norm and other metrics of a step (those with a true value above 1e-3); of the weights after the last step as
one vector, or of values computed with them; and absolute differences of a server's outputs. In brackets is what the
tests allow. Ends with pytest's exit code. `--row` runs only the rows whose name contains one of the texts; `--read`
runs nothing, and reads what a run of the tests has written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.accuracy import FILE
from tests.megatron import (
    layouts,
    test_corrected_loss,
    test_critic,
    test_distillation,
    test_divergence,
    test_estimators_in_layouts,
    test_held_out_likelihood,
    test_kto,
    test_layouts,
    test_lora,
    test_muon,
    test_preference_loss,
    test_reward_model,
    test_sharding,
    test_vision_critic,
    test_vision_lora,
)
from tests.megatron.layouts import Layout, of

ROOT = Path(__file__).resolve().parent.parent
PAIR = "2e-5 or 1e-5 absolute"
LOSSES_OF_PAIRS = "cDPO, `robust`, `sigmoid_norm`, `hinge`, `ipo`, `simpo`, `orpo`, RPO, reference-free"


@dataclass(frozen=True)
class Row:
    """One algorithm: `tests` are node ids without their parameters, below tests/."""

    name: str
    reference: str  # besides float64 autograd
    allowed: tuple[str, str]  # of loss and other metrics, of weights or values; "" where there is none
    table: Mapping[str, Layout]  # of the tests: the layouts by name; {}: `note` says where they run
    tests: tuple[str, ...]
    note: str = ""  # more about the layouts
    parameters: tuple[str, ...] = ()  # of the node ids, one of which must be in it; (): all

    @property
    def layouts(self) -> str:
        """The number of layouts and the kinds of parallelism that they have, with the note."""
        return (layouts.summary_of(self.table.values()) if self.table else "") + self.note

    @property
    def file(self) -> str:
        return ", ".join(f"`{name}`" for name in dict.fromkeys(test.split("::")[0] for test in self.tests))

    def has(self, nodeid: str) -> bool:
        """Whether a test with this id belongs to the row."""
        test, _, parameters = nodeid.removeprefix("tests/").partition("[")
        return test in self.tests and (not self.parameters or any(one in parameters for one in self.parameters))

    def line(self, worst: dict[str, float]) -> str:
        """The row of the table, with the measured differences by quantity."""
        loss, weights = self.allowed
        first = _cell(worst.get("output", worst.get("loss")), loss)
        cells = (self.name, self.reference, first, _cell(worst.get("weights"), weights), self.layouts, self.file)
        return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


POLICY_LOSS = {name: test_layouts.EVERY[name] for name, _, _ in test_layouts.CASES}
SHARDED = {name: Layout(2, flags) for name, (_, flags, _, _) in test_sharding.SHARDED.items()}
CORRECTIONS = of(test_corrected_loss.LAYOUTS)
WITH_WEIGHTS = of(test_corrected_loss.WITH_WEIGHTS)
HELD_OUT = of(test_held_out_likelihood.LAYOUTS | test_held_out_likelihood.SHARDED)
MUON, OF_VALUES = (
    {name: Layout(ranks, flags) for name, (_, ranks, flags) in table.items()}
    for table in (test_muon.STEPS, test_muon.VALUE_MODELS)
)
ROWS = (
    Row(
        "policy loss of GRPO with KL and entropy",
        "",
        ("1e-5", "1e-5"),
        POLICY_LOSS,
        ("megatron/test_layouts.py::test_every_layout_trains_like_plain_autograd",),
        note="; [all 56](parallelism.md#the-table-float32)",
    ),
    Row(
        "the same, Megatron-FSDP",
        "",
        ("1e-5", "1e-5"),
        SHARDED,
        ("megatron/test_sharding.py::test_megatron_fsdp_trains_like_autograd_with_the_planned_memory",),
    ),
    Row(
        "GRPO, RLOO, OPO, REINFORCE++-baseline with their baselines",
        "baselines in plain Python",
        ("1e-5; loss, near 0, 1e-4", "1e-5"),
        of(test_estimators_in_layouts.LAYOUTS),
        ("megatron/test_estimators_in_layouts.py::test_estimator_trains_like_float64_in_every_layout",),
        parameters=("-grpo]", "-rloo]", "-opo]", "-reinforce_plus_plus_baseline]"),
    ),
    Row(
        "REINFORCE++",
        "returns in plain Python",
        ("1e-5; loss, near 0, 1e-4", "1e-5"),
        of(test_estimators_in_layouts.LAYOUTS),
        ("megatron/test_estimators_in_layouts.py::test_estimator_trains_like_float64_in_every_layout",),
        parameters=("-reinforce_plus_plus]",),
    ),
    Row(
        "GSPO, CISPO",
        "",
        ("1e-5; loss, near 0, 1e-4", "1e-5"),
        of(test_estimators_in_layouts.LAYOUTS),
        ("megatron/test_estimators_in_layouts.py::test_estimator_trains_like_float64_in_every_layout",),
        parameters=("-gspo]", "-cispo]"),
    ),
    Row(
        "Dr. GRPO",
        "",
        ("1e-5; loss, near 0, 1e-4", "1e-5"),
        of(test_estimators_in_layouts.LAYOUTS),
        ("megatron/test_estimators_in_layouts.py::test_estimator_trains_like_float64_in_every_layout",),
        parameters=("-dr_grpo]",),
    ),
    Row(
        "weights of `--tis-batch-normalize`",
        "weights in plain Python",
        ("1e-5; loss, near 0, 1e-4", "1e-5"),
        WITH_WEIGHTS,
        ("megatron/test_corrected_loss.py::test_weights_divided_by_their_mean_train_like_float64_in_every_layout",),
        note=", each with 3 levels",
    ),
    Row(
        "other corrections (TIS, MIS, rejection)",
        "sums in plain Python (1e-9); layouts against one rank",
        ("1e-4", "1e-5"),
        CORRECTIONS,
        ("megatron/test_corrected_loss.py::test_every_layout_corrects_alike",),
    ),
    Row(
        "likelihood of positive examples",
        "mean in plain Python; layouts against one rank",
        ("1e-4", "1e-5"),
        CORRECTIONS,
        ("megatron/test_positive_examples.py::test_every_layout_adds_the_mean_over_the_positive_tokens_of_the_step",),
    ),
    Row(
        "critic of PPO, generalized advantages",
        "sums over all later differences",
        ("1e-4", "values 2e-4"),
        of(test_critic.LAYOUTS),
        ("megatron/test_critic.py::test_critic_is_trained_as_by_plain_autograd",),
        note="; two also with normalized values, four with λ by length",
    ),
    Row(
        "critic that sees images",
        "transformers' vision-language models",
        ("1e-4", "values 2e-4"),
        of(test_vision_critic.LAYOUTS),
        ("megatron/test_vision_critic.py::test_critic_that_sees_images_is_trained_as_by_plain_autograd",),
    ),
    Row(
        "distillation, sampled reverse KL",
        "",
        ("1e-5; loss, near 0, 2e-5", "1e-5"),
        of(test_distillation.LAYOUTS),
        ("megatron/test_distillation.py::test_every_layout_distils_like_plain_autograd",),
    ),
    Row(
        "distillation, divergences of distributions",
        "",
        ("2e-5", "1e-5"),
        of(test_divergence.LAYOUTS),
        ("megatron/test_divergence.py::test_every_layout_trains_on_the_divergence_like_plain_autograd",),
        note="; one divergence in each",
    ),
    Row(
        "distillation, top tokens of a served teacher",
        "",
        ("2e-5", "1e-5"),
        of(test_divergence.TOP_LAYOUTS),
        ("megatron/test_divergence.py::test_every_layout_trains_on_the_top_tokens_of_a_served_teacher",),
        note="; one divergence in each",
    ),
    Row(
        "DPO",
        "",
        (PAIR, "1e-5"),
        of(test_preference_loss.LAYOUTS),
        ("megatron/test_preference_loss.py::test_dpo_trains_like_plain_autograd_in_every_layout",),
    ),
    Row(
        f"other losses of pairs: {LOSSES_OF_PAIRS}",
        "",
        (PAIR, "1e-5"),
        of(test_preference_loss.LAYOUTS),
        ("megatron/test_preference_loss.py::test_losses_of_pairs_train_like_plain_autograd",),
    ),
    Row(
        "DPO with three rejected answers",
        "",
        (PAIR, "1e-5"),
        of(test_preference_loss.LAYOUTS, test_preference_loss.SEVERAL),
        ("megatron/test_preference_loss.py::test_several_rejected_answers_train_like_plain_autograd",),
    ),
    Row(
        "KTO",
        "its formulas as in TRL",
        (PAIR, "1e-5"),
        of(test_kto.LAYOUTS),
        ("megatron/test_kto.py::test_kto_trains_like_plain_autograd_in_every_layout",),
    ),
    Row(
        "`apo_zero_unpaired`",
        "its formula as in TRL",
        (PAIR, "1e-5"),
        of(test_kto.LAYOUTS),
        ("megatron/test_kto.py::test_apo_zero_trains_like_plain_autograd",),
    ),
    Row(
        "reward model",
        "",
        ("1e-4 or 1e-5 absolute", "losses 2e-4"),
        of(test_reward_model.CASES),
        ("megatron/test_reward_model.py::test_reward_model_is_trained_as_by_plain_autograd",),
        note="; one of the two losses in each",
    ),
    Row(
        "reward model exported by `--save-hf`",
        "transformers' classifier in float64",
        ("1e-5", ""),
        of(test_reward_model.CASES, test_reward_model.EXPORTED),
        ("megatron/test_reward_model.py::test_export_at_a_save_is_the_classifier_that_was_trained",),
    ),
    Row(
        "supervised training",
        "",
        ("1e-5", "1e-5"),
        HELD_OUT,
        ("megatron/test_held_out_likelihood.py::test_supervised_training_is_that_of_plain_autograd",),
    ),
    Row(
        "held-out loss of supervised training",
        "",
        ("1e-5", ""),
        HELD_OUT,
        ("megatron/test_held_out_likelihood.py::test_held_out_loss_is_that_of_transformers",),
    ),
    Row(
        "LoRA adapters",
        "W + α / r B A written out",
        ("2e-5", "1e-5"),
        of(test_lora.LAYOUTS),
        ("megatron/test_lora.py::test_adapters_train_like_plain_autograd_in_every_layout",),
    ),
    Row(
        "LoRA adapters of vision-language models",
        "W + α / r B A written out",
        ("2e-5", "1e-5"),
        of(test_vision_lora.LAYOUTS),
        ("megatron/test_vision_lora.py::test_adapters_behind_a_tower_train_like_plain_autograd",),
    ),
    Row(
        "Muon",
        "Newton-Schulz by singular values",
        ("2e-4", "2e-4"),
        MUON,
        ("megatron/test_muon.py::test_step_of_muon_equals_float64",),
    ),
    Row(
        "Muon of a critic",
        "the same",
        ("5e-4", "values 1e-3"),
        OF_VALUES,
        ("megatron/test_muon.py::test_critic_trained_with_muon_equals_float64",),
    ),
    Row(
        "Muon of a reward model",
        "the same",
        ("5e-4", "losses 1e-3"),
        OF_VALUES,
        ("megatron/test_muon.py::test_reward_model_trained_with_muon_equals_float64",),
    ),
    Row(
        "SGD",
        "torch's",
        ("1e-5", "1e-5"),
        {"TP2": Layout(2, layouts.TP2)},
        ("megatron/test_muon.py::test_step_of_sgd_equals_float64",),
        note=", with and without momentum",
    ),
    Row(
        "rewards of a served reward model",
        "transformers' classifier in float32",
        ("1e-5 absolute", ""),
        {},
        ("cluster/test_reward_server.py::test_rewards_match_transformers_logits_and_a_dead_server_is_named",),
        note="real server",
    ),
    Row(
        "the same, of one that slimrl trained",
        "transformers' classifier in float32",
        ("1e-5 absolute", ""),
        {},
        ("end_to_end/test_reward_model_training.py::test_trained_reward_model_scores_the_samples_of_a_run",),
        note="real server, whole run",
    ),
    Row(
        "rewards of steps",
        "transformers' token classifier in float32; its Qwen2 with a head of two layers",
        ("1e-5 absolute", ""),
        {},
        ("cluster/test_reward_server.py::test_rewards_of_steps_are_those_of_a_token_classifier_in_one_pass",),
        note="real server",
    ),
    Row(
        "log-probabilities of two served teachers",
        "transformers in float64",
        ("1e-4 absolute", ""),
        {},
        (
            "cluster/test_teacher_server.py"
            "::test_started_teachers_score_the_samples_of_their_datasets_like_transformers",
        ),
        note="real servers",
    ),
)
HEADER = """| algorithm | reference, besides float64 autograd | loss, gradient norm | weights | layouts | `tests/` |
| --- | --- | --- | --- | --- | --- |"""


def _cell(measured: float | None, allowed: str) -> str:
    if measured is None:
        return f"({allowed})" if allowed else ""
    return f"{measured:.1e} ({allowed})".replace("e-0", "e-")


def run(rows: list[Row], workers: int, file: Path) -> int:
    """Runs the tests of the rows, which append their differences to the file; returns pytest's exit code."""
    names = dict.fromkeys(f"tests/{test}" for row in rows for test in row.tests)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", FILE: str(file)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-p", "no:cacheprovider", *names]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def worst(rows: list[Row], file: Path) -> dict[str, dict[str, float]]:
    """The worst difference in the file by row and quantity."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for entry in map(json.loads, file.read_text().splitlines()):
        for row in (row for row in rows if row.has(entry["test"])):
            of_row = found[row.name]
            of_row[entry["quantity"]] = max(of_row.get(entry["quantity"], 0.0), entry["value"])
    return found


def main() -> None:
    """Prints the table and the largest difference of a gradient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", metavar="TEXT", help="only rows whose name contains it")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests (2)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="what a run of the tests has written")
    args = parser.parse_args()
    rows = [row for row in ROWS if args.row is None or any(text in row.name for text in args.row)]
    code = 0
    if args.read is None:
        with tempfile.NamedTemporaryFile() as file:
            code = run(rows, args.workers, Path(file.name))
            found = worst(rows, Path(file.name))
    else:
        found = worst(rows, args.read)
    print(HEADER, *(row.line(found[row.name]) for row in rows), sep="\n")
    gradients = max((of_row["gradients"] for of_row in found.values() if "gradients" in of_row), default=None)
    if gradients is not None:
        print(f"\nGradients of the last step, as one vector: at most {gradients:.1e}")
    sys.exit(code)


if __name__ == "__main__":
    main()
