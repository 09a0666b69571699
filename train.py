"""Synchronous training: generate, train, update weights, repeat.

    python3 train.py ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ...

Training and generation take turns, on the same GPUs (`--colocate`) or on their own
(`--rollout-num-gpus`); every sample is sampled from the weights it is trained on, but for groups that a
dynamic sampling filter left over: they were finished in an earlier turn.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slimrl.cluster.main import main

if TYPE_CHECKING:
    from slimrl.cluster.run import Run


def train(run: Run) -> None:
    """The loop: one turn per rollout."""
    run.update_weights(run.weight_version)
    run.evaluate_before_training()
    for rollout_id in run.rollout_ids:
        with run.step(rollout_id):
            rollout = run.generate(rollout_id)
            metrics = run.train(rollout)
            run.save_if_due(rollout, metrics)
            run.update_weights(rollout_id + 1)
            run.record(rollout, metrics)
        run.evaluate_if_due(rollout_id)


if __name__ == "__main__":
    sys.exit(main("train.py", train))
