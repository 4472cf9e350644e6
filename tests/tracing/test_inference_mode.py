"""A region in inference mode is traced as one without gradients."""

from typing import ClassVar

import torch
from torch import nn

from autopar.tracing import trace


class Taught(nn.Module):
    """A student whose teacher runs in inference mode, in which one op is run with gradients enabled."""

    asked: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(3, 3), nn.Linear(3, 3)

    @torch.inference_mode()
    def lesson(self, x):
        self.asked.append(torch.is_inference_mode_enabled())
        goal = self.teacher(x)
        goal.mul_(2.0)
        with torch.inference_mode(False):
            self.asked.append(torch.is_inference_mode_enabled())
            extra = self.teacher.bias * 1.0
        return goal, extra

    def forward(self, x):
        goal, extra = self.lesson(x)
        self.asked.append(torch.is_inference_mode_enabled())
        return (self.student(x) + extra - goal.clone()).square().mean()


def test_the_graph_has_the_models_values_and_gradients():
    model, x = Taught(), torch.randn(2, 3)
    model.asked.clear()
    traced = trace(model, {"x": x})
    assert model.asked == [True, False, False]
    parameters = dict(model.named_parameters())
    found = [torch.autograd.grad(f(x), list(parameters.values()), allow_unused=True) for f in (traced.gm, model)]
    for name, mine, theirs in zip(parameters, *found, strict=True):
        assert (mine is None) == (theirs is None) == (name == "teacher.weight")
        assert mine is None or torch.equal(mine, theirs)


def test_the_mode_is_itself_again_after_a_trace():
    trace(Taught(), {"x": torch.randn(2, 3)})
    with torch.inference_mode():
        assert torch.ones(1).is_inference()
