"""One step ahead: the next rollout is generated while this one trains.

    python3 train_async.py ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ...

Training and generation need slots of their own (no `--colocate`). Weights are pushed between two
generations, never under one, every `--update-weights-interval` rollouts: with the default of 1 a
sample is at most one version older than the weights it trains.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slimrl.cluster.main import main

if TYPE_CHECKING:
    from slimrl.cluster.run import Run


def train(run: Run) -> None:
    """The loop: while rollout n trains, rollout n + 1 is on its way."""
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
            if run.weights_due(rollout_id) or run.evaluation_due(rollout_id):
                run.wait_for(generation)
                run.update_weights(rollout_id + 1)
            run.record(rollout, metrics)
        run.evaluate_if_due(rollout_id)


if __name__ == "__main__":
    sys.exit(main("train_async.py", train))
