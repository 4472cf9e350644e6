"""Branches that only raise are assertions: their condition on unknown data decides no path, and is assumed to hold."""

from __future__ import annotations

import dis
import linecache
import textwrap

import pytest
import torch
from torch import nn

from autopar.tracing import TraceError, trace
from autopar.tracing.contents import asserting

BELIEVED = {
    "raise": "if (x > 1).any(): raise ValueError('a')",
    "not": "if not (x < 9).any():\n    raise ValueError('a')",
    "message": "if (x > 9).any():\n    raise ValueError(f'{x.shape} bad {self.flag!r}')",
    "and before": "if self.flag and (x > 9).any(): raise ValueError('a')",
    "and after": "if (x > 9).any() and self.flag: raise ValueError('a')",
    "or": "if (x > 9).any() or (x > 8).all(): raise ValueError('a')",
    "else": "if (x < 9).any(): x = x + 1\nelse: raise ValueError('k')",
    "torch._assert": "if (x > 9).any():\n    i = torch.where(x)[0][0]\n    torch._assert(False, f'x {x[i].tolist()}')",
    "number": "if x.sum().item() > 99: raise ValueError('k')",
    "with": "with torch.no_grad():\n    if (x > 9).any() and self.flag: raise ValueError('a')",
    "loop": "for i in range(2):\n    if (x > 9).any(): raise ValueError('a')",
    "finally": "try:\n    if (x > 9).any(): raise ValueError('a')\nfinally:\n    y = 2",
    "after try": "try:\n    y = 1\nfinally:\n    y = 2\nif (x > 9).any(): raise ValueError('a')",
    "assert": "assert (x < 9).all(), 'm'",
}
REFUSED = {
    "branch": "if (x > 1).any(): x = x + 1",
    "acts, then raises": "if (x > 1).any():\n    x = x + 1\n    if self.flag: raise ValueError('a')",
    "calls, then raises": "if (x > 1).any():\n    x.add_(1)\n    if self.flag: raise ValueError('a')",
    "sets, then raises": "if (x > 1).any():\n    self.n = 3\n    raise ValueError('a')",
    "while": "while (x > 1).any():\n    x = x - 1",
    "return": "if (x > 1).any(): return x",
    "continue": "for i in range(2):\n    if (x > 1).any():\n        continue\n    x = x + 1",
    "caught": "try:\n    if (x > 1).any(): raise ValueError('a')\nexcept ValueError:\n    x = x + 1",
    "caught outside a with": (
        "try:\n    with torch.no_grad():\n        if (x > 1).any(): raise ValueError('a')\n"
        "except ValueError:\n    x = x + 1"
    ),
    "none": "if (x.sum() if (x > 1).any() else None) is None: raise ValueError('a')",
}


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flag = nn.Linear(4, 4), True


def model(body: str) -> nn.Module:
    source = f"def forward(self, x):\n{textwrap.indent(body, '    ')}\n    return self.linear(x)\n"
    name = f"<test {hash(body)}>.py"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope = {"torch": torch}
    exec(compile(source, name, "exec"), scope)
    return type("Tested", (Base,), {"forward": scope["forward"]})()


@pytest.mark.parametrize("name", BELIEVED)
def test_a_branch_that_only_raises_is_believed(name):
    tested, x = model(BELIEVED[name]), torch.rand(2, 4)
    assert torch.equal(trace(tested, dict(x=x)).gm(x), tested(x))


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name):
    with pytest.raises(TraceError, match="contents"):
        trace(model(REFUSED[name]), dict(x=torch.rand(2, 4)))


def test_what_a_caller_catches_is_no_assertion():
    class Stopping(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                raise StopIteration
            return x

    class Catching(nn.Module):
        def __init__(self):
            super().__init__()
            self.stopping = Stopping()

        def forward(self, x):
            try:
                return self.stopping(x)
            except StopIteration:
                return x * 2

    with pytest.raises(TraceError, match="contents"):
        trace(Catching(), dict(x=torch.rand(3)))


@pytest.mark.parametrize(("low", "high", "whole"), [(0, 1, 0), (0.0, 1.0, 0), (2, 3, 2), (0, 2, None), (-1, 1, None)])
def test_the_whole_part_of_a_draw_is_known_where_its_bounds_leave_no_doubt(low, high, whole):
    """As in a transform that draws among the allowed sizes of pictures, of which there is only one."""

    def chosen(x):
        return x * (1 + int(torch.empty(1).uniform_(low, high).item()))

    x = torch.rand(3)
    if whole is None:
        with pytest.raises(TraceError, match="value"):
            trace(chosen, dict(x=x))
    else:
        assert torch.equal(trace(chosen, dict(x=x)).gm(x), x * (1 + whole))


@pytest.mark.parametrize(("bound", "known"), [(3.0, True), (4.0, True), (5.0, False), (6.0, True)])
def test_a_draw_is_compared_with_its_own_bounds(bound, known):
    def chosen(x):
        return x * 2 if torch.empty(()).uniform_(4.0, 6.0) < bound else x * 3

    x = torch.rand(3)
    if not known:
        with pytest.raises(TraceError, match="random"):
            trace(chosen, dict(x=x))
    else:
        assert torch.equal(trace(chosen, dict(x=x)).gm(x), x * (2 if bound == 6.0 else 3))


def caught(call):
    try:
        call()
    except TypeError:
        return 1


def translated(call):
    try:
        call()
    except TypeError as error:
        raise ValueError("other") from error


def finishing(call):
    try:
        call()
    finally:
        call = None


def within(call):
    with call:
        call()


def caught_around_a_with(call):
    try:
        with call:
            call()
    except ValueError:
        pass


def caught_by_all(call):
    try:
        call()
    except:  # noqa: E722
        return 1


def translated_and_caught(call):
    try:
        try:
            call()
        except KeyError as error:
            raise ValueError from error
    except ValueError:
        return 2


def perhaps_raised_again(call):
    try:
        call()
    except TypeError:
        if call is None:
            raise
        return 1


def beside(call):
    call()
    try:
        return 1
    except TypeError:
        return 2


@pytest.mark.parametrize(
    "ends", [caught, caught_around_a_with, caught_by_all, translated_and_caught, perhaps_raised_again]
)
def test_an_error_that_a_function_may_end(ends):
    assert asserting._is_caught(ends.__code__, call_in(ends))


@pytest.mark.parametrize("passes", [translated, finishing, within, beside])
def test_an_error_that_leaves_a_function(passes):
    assert not asserting._is_caught(passes.__code__, call_in(passes))


def call_in(function):
    """The position of the first call of `call` in the code."""
    found = [i for i in dis.get_instructions(function) if i.opname.startswith("CALL") or i.opname == "BEFORE_WITH"]
    names = [i.opname for i in found]
    return found[names.index("BEFORE_WITH") + 1 if "BEFORE_WITH" in names else 0].offset
