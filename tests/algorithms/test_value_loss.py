"""The clipped value loss and its gradient against numbers by hand."""

from __future__ import annotations

import torch

from slimrl.algorithms.losses import clipped_value_loss


def test_loss_is_the_larger_square_of_the_value_and_the_clipped_value():
    values, old = torch.tensor([1.0, 1.0, 0.25, -1.0]), torch.tensor([0.0, 0.0, 0.0, 0.0])
    returns = torch.tensor([2.0, -1.0, 1.0, 1.0])
    loss, clipped = clipped_value_loss(values, old, returns, value_clip=0.5)
    # clipped at 0.5: (0.5 - 2)^2 is above (1 - 2)^2; moved away: (1 + 1)^2; inside; moved away: (-1 - 1)^2
    assert loss.tolist() == [2.25, 4.0, 0.5625, 4.0]
    assert clipped.tolist() == [1.0, 1.0, 0.0, 1.0]


def test_value_clipped_on_its_way_to_the_return_gets_no_gradient():
    values = torch.tensor([1.0, 1.0, 0.25], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([2.0, -1.0, 1.0], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    clipped_value_loss(values, old, returns, value_clip=0.5)[0].sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0.0, 4.0, -1.5]
    assert old.grad is None and returns.grad is None
