"""A flow of one's own over the methods of `Run`, as ChatLearn's environment, trainer and evaluator.

    python3 examples/flow.py ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ...       # the flags of train.py

The flags place the models: policy, engines, critic (--advantage-estimator ppo), reference (--ref-load) and reward model
(--rm-model). The functions below are the edges between them. Unlike train.py this flow evaluates when the mean reward
has risen by `RISE`, without reading --eval-interval, and ends once it has reached `ENOUGH`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slimrl.cluster.command_line import main

if TYPE_CHECKING:
    from slimrl.cluster.rollout_manager import RolloutResult
    from slimrl.cluster.run import Run

RISE, ENOUGH = 0.05, 0.95  # in units of reward


def environment(run: Run, rollout_id: int) -> RolloutResult:
    """Prompts -> policy -> reward: the engines generate, and each response is scored when it is finished."""
    return run.generate(rollout_id)


def trainer(run: Run, rollout: RolloutResult) -> None:
    """Samples -> reference -> critic -> policy, a checkpoint if one is due, and the new weights to the engines."""
    metrics = run.train(rollout)
    run.save_if_due(rollout, metrics)
    run.update_weights(rollout.rollout_id + 1)
    run.record(rollout, metrics)


def learn(run: Run) -> None:
    """The flow: give --save-interval 1, so that the last rollout before an early end is saved."""
    run.update_weights(run.weight_version)
    best = 0.0
    for rollout_id in run.rollout_ids:
        with run.step(rollout_id):
            rollout = environment(run, rollout_id)
            trainer(run, rollout)
        reward = rollout.metrics["rollout/raw_reward"]
        if run.args.eval_datasets and reward >= best + RISE:
            best = reward
            run.evaluate(rollout_id)
        if reward >= ENOUGH:
            return


if __name__ == "__main__":
    sys.exit(main("train.py", learn))  # the rules of a synchronous loop apply
