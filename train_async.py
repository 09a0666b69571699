"""Asynchronous training: generation overlaps training, one-step off-policy or fully asynchronous.

    python3 train_async.py ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ...

Training and generation need separate GPUs (no `--colocate`). Weights are updated every `--update-weights-interval`
rollouts, between two generations unless `--update-weights-in-flight` is given.

One-step off-policy: the next rollout is generated while this one trains. With an interval of 1 a sample is at most
one version older than the weights it trains. Fully asynchronous (`--max-weight-staleness N`): generation never stops.
A rollout consists of finished groups, and none of its tokens is more than N versions older than the weights it trains
(docs/asynchrony.md).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slimrl.cluster.command_line import main

if TYPE_CHECKING:
    from slimrl.cluster.run import Run


def train(run: Run) -> None:
    """The training loop: rollout n + 1 (with `--max-weight-staleness`: and later ones) is in flight while n trains."""
    run.update_weights(run.weight_version)
    run.evaluate_before_training()
    generation = run.start_generation(run.rollout_ids.start) if run.rollout_ids else None
    for rollout_id in run.rollout_ids:
        with run.step(rollout_id):
            rollout = run.finish_generation(generation)
            if rollout_id + 1 in run.rollout_ids:
                generation = run.start_generation(rollout_id + 1)
            metrics = run.train(rollout)
            run.save_if_due(rollout, metrics)
            if run.should_update_weights(rollout_id) or run.should_evaluate(rollout_id):
                run.drain_generation(generation)
                run.update_weights(rollout_id + 1)
            run.record(rollout, metrics)
        run.evaluate_if_due(rollout_id)


if __name__ == "__main__":
    sys.exit(main("train_async.py", train))
