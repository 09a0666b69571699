"""A packed micro-batch goes through the model and the loss without the host waiting for the device.

The model is on a device without values ("meta"): reading one raises, while tensors that the host created can be read.
Experts, whose input lengths depend on the router, are counted on the CPU.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from tests.megatron import ranks, tiny
from tests.megatron.conftest import Models
from tests.megatron.host_reads import HostReads, Transfers
from tests.megatron.launch import RankPool
from tests.megatron.layouts import CP2, EP2, FULL, selective
from tests.megatron.test_rotary import LATENT, VARIANTS, YARN

NOWHERE = torch.device("meta")
MODELS: dict[str, dict[str, Any]] = VARIANTS | {
    "rope, full": FULL,
    "rope, core_attn and mlp": selective("core_attn", "mlp"),
    "latent, full": LATENT | FULL,
    "latent, YaRN, core_attn and mla_up_proj": YARN | selective("core_attn", "mla_up_proj"),
    "logits kept": {"keep_logits": True},
}
LOSSES: dict[str, dict[str, Any]] = {
    "per sample": {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.1, "eps_clip_c": 3.0},
    "per token": {"calculate_per_token_loss": True},
    "GSPO": {"advantage_estimator": "gspo"},
    "CISPO": {"advantage_estimator": "cispo"},
    "corrected for who drew": {"use_tis": True, "use_opsm": True, "opsm_delta": 0.1},
    "rejected": {
        "use_tis": True,
        "tis_level": "sequence",
        "tis_mode": "mask",
        "use_rs": True,
        "rs_level": "geometric",
        "rs_upper_bound": 2.0,
        "rs_veto_threshold": 1e-4,
    },
    "unbiased KL": {"use_unbiased_kl": True, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "supervised": {"loss_type": "sft_loss"},
    "pairs": {"loss_type": "preference_loss", "n_samples_per_prompt": 2},
    "several rejected": {"loss_type": "preference_loss", "n_samples_per_prompt": 4},
    "labelled": {"loss_type": "preference_loss", "preference_loss": "kto"},
}


def train_nowhere(
    rank: int, world_size: int, init_method: str, models: dict[str, Arguments], losses: dict[str, Arguments]
) -> dict[str, dict[str, int]]:
    """Copies from the host to the device, by model and by loss; raises if a value is read back."""
    from megatron.core.models.common.embeddings import rotary_pos_embedding

    from slimrl.megatron import parallel
    from slimrl.megatron.model.micro_batch import pack_micro_batch
    from slimrl.megatron.model.model_builder import build_model
    from slimrl.megatron.training import forward_step
    from slimrl.megatron.training.log_prob_passes import RolloutLogProbs
    from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, policy_loss_sums
    from slimrl.megatron.training.loss.preference_loss import PairLoss

    plain = tiny.tiny_args()
    state = parallel.initialize(plain, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    rollout = tiny.recorded_rollout(3)
    micro_batch = pack_micro_batch(rollout, range(len(rollout)), length_multiple=1, device=NOWHERE)
    column = torch.zeros(rollout.loss_mask.numel(), device=NOWHERE)
    columns = forward_step.TrainTensors(*[column] * 6)
    scores = RolloutLogProbs(column, first_step=torch.zeros(2, column.numel(), device=NOWHERE))

    cuda = rotary_pos_embedding.torch.cuda  # megatron-core's view of it
    host = cuda.current_device

    def run(model: torch.nn.Module, args: Arguments) -> dict[str, int]:
        settings = forward_step.LogProbConfig.from_args(args, state)
        packed, wanted = micro_batch.sequences, settings.wanted(micro_batch)
        cuda.current_device = lambda: NOWHERE
        model(micro_batch.tokens, None, None, packed_seq_params=packed)  # the first pass moves the rotary tables
        with Transfers() as transfers:
            output = model(micro_batch.tokens, None, None, packed_seq_params=packed, wanted=wanted)
            log_probs, entropy = settings(output, micro_batch)
            scores.note(micro_batch, log_probs.detach(), entropy.detach())
            pairs = PairLoss.from_args(args, settings)
            if pairs is None:
                inputs = columns.inputs(micro_batch, log_probs, entropy, on_policy=True)
                sums = policy_loss_sums(inputs, PolicyLossConfig.from_args(args))
            else:
                kl = torch.zeros((), dtype=torch.float64, device=NOWHERE)
                sums = pairs.sums(output, micro_batch, columns, labels=column > 0, kl=kl)
            sums.loss.backward()
        cuda.current_device = host
        return dict(transfers.found)

    found = {name: run(build_model(args, state).to(NOWHERE).train(), args) for name, args in models.items()}
    dense = build_model(plain, state).to(NOWHERE).train()
    found |= {name: run(dense, args) for name, args in losses.items()}
    parallel.shutdown()
    return found


@pytest.mark.slow
def test_dense_and_mla_models_and_every_loss_read_nothing_from_the_device(one_rank: RankPool):
    models = {name: tiny.tiny_args(**flags) for name, flags in MODELS.items()}
    losses = {name: tiny.tiny_args(**flags) for name, flags in LOSSES.items()}
    (found,) = one_rank.run(train_nowhere, models, losses)
    assert found == {name: {} for name in (*MODELS, *LOSSES)}


# By layer with several experts on a rank, each time it is computed. On a GPU three of them wait: the two selections,
# and one for the numbers of tokens by expert, which are copied to the host together and then read there.
EXPERTS = {
    "moe_utils.py:permute masked_select": 2,  # the tokens of the experts, and their weights
    "moe_utils.py:sort_chunks_by_idxs tolist": 6,  # lengths and order of tokens, of weights, and on the return
    "experts.py:forward tolist": 1,
}
# these are copied with them
EXPERTS_OF_TWO_RANKS = EXPERTS | {"numpy": 3}
# a tensor that megatron-core creates in host memory, in the pass and in its recomputation
ATTENTION_AGAIN = {"attention.py:custom_forward _local_scalar_dense": 2}
# of the lengths, because they are in host memory here
MICRO_BATCH = {"losses.py:sample_mean_weights _local_scalar_dense": 1}
STEP = {"finalize_model_grads.py:finalize_model_grads _local_scalar_dense": 1}


def count_reads(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> tuple[collections.Counter[str], collections.Counter[str], int, int]:
    """Host reads for log-probabilities and for training; passes for log-probabilities, micro-batches trained."""
    from slimrl.megatron.training import log_prob_passes, policy_rollout

    modules = {"score_tokens": log_prob_passes, "forward_backward": policy_rollout}
    counts = {name: (collections.Counter(), []) for name in modules}

    def watch(name: str) -> None:
        module = modules[name]
        function, (found, sizes) = getattr(module, name), counts[name]

        def call(stages: Any, micro_batches: Any, *rest: Any, **settings: Any) -> Any:
            sizes.append(len(micro_batches))
            with HostReads() as reads:
                result = function(stages, micro_batches, *rest, **settings)
            for place, number in reads.found.items():
                found["numpy" if place.endswith(" numpy") else place] += number  # slimrl's or megatron-core's function
            return result

        setattr(module, name, call)

    for name in counts:
        watch(name)
    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, rollout))
    trainer.close()
    (scored, passes), (trained, micro_batches) = counts.values()
    return scored, trained, sum(passes), sum(micro_batches)


# name: ranks, models, flags, reads by layer computed in a pass for log-probabilities and in training
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, int], dict[str, int]]] = {
    "dense": (1, "models", {}, {}, {}),
    "dense, CP2": (2, "models", CP2 | selective("core_attn"), {}, ATTENTION_AGAIN),
    "experts": (1, "expert_models", {}, EXPERTS, EXPERTS),
    "experts, EP2, full": (
        2,
        "expert_models",
        EP2 | FULL,
        EXPERTS_OF_TWO_RANKS,
        {place: 2 * number for place, number in EXPERTS_OF_TWO_RANKS.items()},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_host_reads_are_counted_per_layer_micro_batch_and_step(
    layout: str, request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool
):
    count, kind, flags, scored_by_layer, trained_by_layer = LAYOUTS[layout]
    models: Models = request.getfixturevalue(kind)
    args = tiny.tiny_args(load=str(models.policy), ref_load=str(models.reference), **models.flags, **flags)
    pool = one_rank if count == 1 else two_ranks
    for scored, trained, passes, micro_batches in pool.run(count_reads, args, tiny.recorded_rollout(3)):
        print(f"{layout}: {dict(scored)} in {passes} passes, {dict(trained)} in {micro_batches} micro-batches")
        assert scored == _times(scored_by_layer, passes * args.num_layers)
        assert trained == (
            _times(trained_by_layer, micro_batches * args.num_layers)
            + _times(MICRO_BATCH, micro_batches)
            + _times(STEP, args.num_steps_per_rollout)
        )


def _times(reads: dict[str, int], count: int) -> collections.Counter[str]:
    return collections.Counter({place: number * count for place, number in reads.items()})
