"""Run inside trainer ranks: the log-probabilities of samples as training computes them."""

from __future__ import annotations

from pathlib import Path

import torch

from slimrl.arguments import Arguments


def log_probs(
    rank: int,
    world_size: int,
    init_method: str,
    args: Arguments,
    folder: Path,
    samples: list[tuple[list[int], list[int]]],
    packs: list[list[list[int]]],
) -> list[list[list[float]]]:
    """Of the response of each sample (prompt, response), once for each packing: lists of indices of `samples`."""
    from slimrl.data.train_batch import RolloutBatch
    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.megatron.model.micro_batch import MicroBatchPacker
    from slimrl.megatron.training.forward_step import LogProbConfig
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint
    from slimrl.weights.hf_checkpoint import read_hf_config

    torch.set_num_threads(1 + rank)  # the results must not depend on it
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    try:
        model = model_builder.build_model(args, state)
        shape, family = ModelSpec.from_args(args), family_for(read_hf_config(folder))
        places = {key: getattr(state, key) for key in ("tp_rank", "tp_size", "etp_rank", "etp_size")}
        load_hf_checkpoint(model, shape, family, folder, **places)
        lengths = [len(response) for _, response in samples]
        count = sum(lengths)
        batch = RolloutBatch(
            tokens=torch.tensor([token for prompt, response in samples for token in prompt + response]),
            total_lengths=torch.tensor([len(prompt) + len(response) for prompt, response in samples]),
            response_lengths=torch.tensor(lengths),
            loss_mask=torch.ones(count),
            rollout_log_probs=torch.zeros(count),
            raw_rewards=torch.zeros(len(samples)),
            rewards=torch.zeros(len(samples)),
            group_ids=torch.arange(len(samples)),
            sample_ids=torch.arange(len(samples)),
            truncated=torch.zeros(len(samples), dtype=torch.bool),
        )
        pack, score = MicroBatchPacker.of_rank(args, args, state), LogProbConfig.from_args(args, state)
        results = []
        for packing in packs:
            found: dict[int, list[float]] = {}
            for rows in packing:
                micro = pack(batch, rows)
                with torch.enable_grad():
                    output = model(
                        micro.tokens, None, None, packed_seq_params=micro.sequences, wanted=score.wanted(micro)
                    )
                values = score(output, micro)[0].detach()
                found |= dict(zip(rows, values.split([lengths[row] for row in rows]), strict=True))
            results.append([found[index].tolist() for index in range(len(samples))])
        return results
    finally:
        parallel.shutdown()
