"""Generation beside training: one-step off-policy, or without end.

    python3 train_async.py ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ...

Training and generation need GPUs of their own (no `--colocate`). Weights are updated every
`--update-weights-interval` rollouts, between two generations unless `--update-weights-in-flight` is given.

One-step off-policy, the next rollout is generated while this one trains: with an interval of 1 a sample is at
most one version older than the weights it trains. With `--max-weight-staleness N` generation never
stops: a rollout takes what is finished, and no token of it is more than N versions older than the
weights it trains (docs/asynchrony.md).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slimrl.cluster.main import main

if TYPE_CHECKING:
    from slimrl.cluster.run import Run


def train(run: Run) -> None:
    """The loop: while rollout n trains, rollout n + 1 is in flight, and more with `--max-weight-staleness`."""
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
