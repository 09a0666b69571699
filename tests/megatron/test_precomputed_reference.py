"""A folder of the reference's log-probabilities changes which passes run, and no number of training."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.observability.metrics import is_known
from tests.megatron import layouts, ranks, tiny
from tests.megatron.layouts import CP2, DYNAMIC, EP2, OVERLAP, PAIRS, PP2, SPREAD, TP2_SP, VIRTUAL, Layout, fsdp
from tests.megatron.test_preference_loss import Pairs

LAYOUTS = {
    "1 rank": (Layout(1, PAIRS), "dense"),
    "DP2, distributed optimizer, packed": (Layout(2, OVERLAP | DYNAMIC | {"balance_data": True}), "dense"),
    "TP2 SP, packed": (Layout(2, TP2_SP | DYNAMIC), "dense"),
    "PP2": (Layout(2, PP2 | PAIRS), "dense"),
    "PP2 virtual, packed": (Layout(2, VIRTUAL | DYNAMIC, 4), "dense"),
    "CP2, packed": (Layout(2, CP2 | DYNAMIC), "MLA"),
    "EP2, packed": (Layout(2, EP2 | SPREAD | DYNAMIC), "MoE"),
    "DP2, Megatron-FSDP": (Layout(2, fsdp("optim_grads_params") | PAIRS), "dense"),
}
SHARE = "rollout/stored_ref_log_probs"


@dataclasses.dataclass
class Trained:
    """What some rollouts, and the evaluation of the last one, left on a rank."""

    metrics: list[list[dict[str, float]]]
    evaluated: dict[str, float]
    weights: dict[str, torch.Tensor]
    shares: list[float | None]  # of the samples whose values were stored
    passes: list[int]  # micro-batches without gradient of each rollout, and of the evaluation: of the reference
    totals: list[int]  # announced micro-batches of each rollout


def train(rank: int, world_size: int, init_method: str, args: Any, rollouts: list[Any]) -> Trained:
    """Trains on each of `rollouts` and evaluates the last one, counting what the model really computes."""
    progress: list[tuple[int, int]] = []
    trainer = ranks.start(rank, world_size, init_method, args, on_progress=lambda *now: progress.append(now))
    counted = [0]

    def count(*_: Any) -> None:
        counted[-1] += not torch.is_grad_enabled()

    trainer.stages[0].decoder.layers[0].register_forward_pre_hook(count)  # also called within Megatron-FSDP
    metrics, shares = [], []
    for number, rollout in enumerate(rollouts):
        metrics.append(trainer.train(number, ranks.share_of(trainer, rollout)))
        report = trainer.rollout_metrics
        assert all(is_known(name) for name in report)
        assert ("perf/ref_log_probs_time" in report) == ("perf/ref_log_probs_tflops" in report) == (counted[-1] > 0)
        shares.append(report.get(SHARE))
        counted.append(0)
    share = ranks.share_of(trainer, rollouts[-1])
    evaluated = trainer.held_out.evaluate(share)
    counted[-1] -= sum(map(len, share.micro_batches))  # the policy's
    totals = [total for done, total in progress if done == total]
    result = Trained(metrics, evaluated, ranks.export(trainer), shares, counted, totals)
    trainer.close()
    return result


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


@pytest.fixture
def run(pairs: Pairs, pools: Any, tmp_path: Path) -> Callable[..., Trained]:
    """Trains in a layout of the table on `rollouts`, with the folder if asked; asserts that the ranks agree."""

    def found(name: str, rollouts: list[Any], *, folder: bool = True, **changes: Any) -> Trained:
        layout, kind = LAYOUTS[name]
        own = {"precompute_ref_log_probs": str(tmp_path / "reference")} if folder else {}
        args = pairs.flags(layout, kind, **(own | changes))
        args.hf_checkpoint = args.ref_load
        first, *others = pools[layout.ranks].run(train, args, rollouts)
        for other in others:
            assert (other.metrics, other.evaluated, other.passes) == (first.metrics, first.evaluated, first.passes)
        return first

    return found


def assert_equal(one: Trained, other: Trained) -> None:
    """Bit for bit."""
    assert (one.metrics, one.evaluated) == (other.metrics, other.evaluated)
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "PP2"])
def test_later_epochs_and_runs_have_the_same_numbers_without_a_pass(name: str, pairs: Pairs, run: Any):
    epochs = [pairs.rollout] * 2
    plain = run(name, epochs, folder=False)
    filled = run(name, epochs)
    assert_equal(filled, plain)
    every = plain.passes[0]
    assert plain.passes == [every] * 3 and plain.shares == [None] * 2
    assert filled.passes == [every, 0, 0] and filled.shares == [0.0, 1.0]
    read = run(name, epochs)
    assert_equal(read, plain)
    assert read.passes == [0] * 3 and read.shares == [1.0] * 2
    micro_batches = plain.totals[0] // 2  # the reference's pass and the optimizer steps
    assert plain.totals == [2 * micro_batches] * 2
    assert filled.totals == [2 * micro_batches, micro_batches] and read.totals == [micro_batches] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "computed"),
    # of two data-parallel ranks one has all values, and computes the micro-batches beside those of the other
    [("1 rank", 0.5), ("PP2", 0.5), ("DP2, Megatron-FSDP", 1.0)],
)
def test_only_micro_batches_that_lack_a_value_are_computed(name: str, computed: float, pairs: Pairs, run: Any):
    half = pairs.rollout.select([*range(4), *range(8, 12)])
    run(name, [half])
    plain, mixed = (run(name, [pairs.rollout], folder=folder) for folder in (False, True))
    assert_equal(mixed, plain)  # a micro-batch is one pair
    assert mixed.shares == [0.5] and mixed.passes == [computed * plain.passes[0], 0]


@pytest.mark.slow
def test_values_of_half_of_a_pack_are_kept(pairs: Pairs, run: Any):
    name = "EP2, packed"
    run(name, [pairs.rollout.select(range(4, 12))])
    plain, mixed = (run(name, [pairs.rollout], folder=folder) for folder in (False, True))
    assert mixed.shares == [0.5] and 0 < mixed.passes[0] <= plain.passes[0]
    assert layouts.relative_error(mixed.weights, plain.weights) < 1e-6
    assert run(name, [pairs.rollout]).passes == [0, 0]


@pytest.mark.slow
def test_other_layout_and_other_loss_read_what_one_layout_has_written(pairs: Pairs, run: Any):
    run("TP2 SP, packed", [pairs.rollout])
    for name, changes in (
        ("PP2", {"preference_loss": "ipo", "preference_beta": 0.1, "lr": 1e-3, "micro_batch_size": 4}),
        ("1 rank", {"preference_loss": "apo_zero_unpaired", "n_samples_per_prompt": 1}),
    ):
        rollout = pairs.rollout.select(torch.arange(15, -1, -1).view(-1, 2).flip(1).flatten())  # another order
        rollout.raw_rewards = (torch.arange(16) % 2 == 0).float()
        plain, read = (run(name, [rollout], folder=folder, **changes) for folder in (False, True))
        assert read.passes == [0, 0] and read.shares == [1.0] and plain.passes[0] > 0
        assert layouts.relative_error(read.weights, plain.weights) < 1e-6
        assert read.evaluated == pytest.approx(plain.evaluated, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_damaged_files_are_computed_again(pairs: Pairs, run: Any, tmp_path: Path):
    plain = run("1 rank", [pairs.rollout], folder=False)
    run("1 rank", [pairs.rollout])
    (path,) = (tmp_path / "reference").glob("*.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = run("1 rank", [pairs.rollout])
    assert_equal(again, plain)
    assert again.shares == [0.0] and again.passes == [plain.passes[0], 0]


def start_badly(rank: int, world_size: int, init_method: str, args: Any) -> str:
    """The error of the start."""
    from slimrl.megatron import parallel

    try:
        ranks.start(rank, world_size, init_method, args).close()
    except RuntimeError as error:
        parallel.shutdown()
        return str(error)
    return ""


@pytest.mark.slow
def test_folder_of_another_reference_is_refused_on_every_rank(pairs: Pairs, pools: Any, run: Any, tmp_path: Path):
    run("DP2, distributed optimizer, packed", [pairs.rollout])
    folder = tmp_path / "reference"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    layout, kind = LAYOUTS["DP2, distributed optimizer, packed"]
    args = pairs.flags(layout, kind, precompute_ref_log_probs=str(folder))
    args.hf_checkpoint = args.ref_load
    errors = pools[2].run(start_badly, dataclasses.replace(args, ref_load=args.load))
    assert len(errors) == 2 and all(
        f"--precompute-ref-log-probs {folder} has log-probabilities of another reference than --ref-load {args.load},"
        f" of the weights that {args.ref_load} had when it was begun: give the same reference, or another folder"
        in error
        for error in errors
    )
    errors = pools[2].run(start_badly, dataclasses.replace(args, rollout_temperature=1.0))
    assert all("other settings (rollout_temperature is 0.8 there and 1.0 here)" in error for error in errors)
    (folder / "reference.json").write_text(json.dumps({"format": "something else"}))
    errors = pools[2].run(start_badly, args)
    assert all("has a damaged reference.json (its format is 'something else')" in error for error in errors)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "reference.json"}
    assert {name: content for name, content in before.items() if name != "reference.json"} == after


@pytest.mark.slow
@pytest.mark.parametrize("flags", [TP2_SP, PP2, CP2], ids=["TP2 SP", "PP2", "CP2"])
def test_same_weights_are_the_same_reference_in_every_layout_and_format(
    flags: dict[str, Any], models: Any, pools: Any, tmp_path: Path
):
    folder = str(tmp_path / "reference")
    args = tiny.tiny_args(load=str(models.policy), ref_load=str(models.reference), **models.flags)
    args = dataclasses.replace(args, loss_type="preference_loss", compute_advantages_and_returns=False)
    args.hf_checkpoint, args.precompute_ref_log_probs = str(models.reference_hf), folder
    assert pools[1].run(start_badly, args) == [""]
    for ref_load, said in ((models.reference_hf, ""), (models.policy, "has log-probabilities of another reference")):
        for error in pools[2].run(start_badly, dataclasses.replace(args, ref_load=str(ref_load), **flags)):
            assert said in error and bool(error) == bool(said)


def test_plan_names_the_folder():
    flags = {"loss_type": "preference_loss", "compute_advantages_and_returns": False}
    assert PassPlan.from_args(tiny.tiny_args(**flags, precompute_ref_log_probs="ref")).sentence() == (
        "a pass of the reference model for samples that --precompute-ref-log-probs ref lacks; no pass of the policy: no"
        " advantages are computed"
    )
