"""Legal splits that the table's rules lack: compares discovery with the table, op by op.

python tests/strategies/missed.py [WORD ...]     # of the cases whose name has one of the words

Prints for every case of the executed check (`test_rules`) the rule that discovery finds and the ways to split that the
table's rule lacks, each with the reason why it is left out (`LEFT_OUT`) or as MISSED; exits with 1 if any is MISSED.
Ops with random or complex results, and ops that run on no small tensors (`discovery.tiny`), are not tried.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))

from autopar.errors import RuleError
from autopar.strategies.arguments import op_name
from autopar.strategies.bind import bind
from autopar.strategies.check import every_strategy
from autopar.strategies.discovery.apart import Died, search_apart
from autopar.strategies.discovery.search import find_rule, holds
from autopar.strategies.discovery.tiny import NotTiny, Tiny
from autopar.strategies.discovery.trying import trials
from autopar.strategies.examples import example
from autopar.strategies.rule import ShardingRule
from autopar.strategies.strategy import Strategy

_PASSING = r".*\bP\b.* -> P|.* -> R\+"  # a partial value or partial gradient is passed on
_CONVOLUTIONS = "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
_NORMS = "batch_norm instance_norm"
_POOLS = "max_pool1d max_pool3d avg_pool1d avg_pool2d avg_pool3d"
# Ops, the ways to split them that the table omits on purpose (a regular expression), and the reason.
LEFT_OUT = (
    ("type_as view_as reshape_as expand_as", r".*", "of the second tensor only dtype or shape count"),
    ("zeros_like new_zeros", r".* -> P", "its results are zeros"),
    ("rms_norm", r"R\+, P -> P|R\+, R\+ -> R\+", "no parameter is stored as partial values"),
    ("embedding", r"R, P -> P", "no parameter is stored as partial values"),
    ("embedding", r"R, R\+ -> R\+", "the table is larger than the activations whose gradient would be joined instead"),
    ("embedding_bag", r"R, (P|R\+).* -> (P|R\+)", "as of embedding"),
    ("embedding_bag", r"S1.* -> P", "a bag is split nowhere: it has few rows"),
    ("embedding_bag", r"S0(@\d+)?, R\+, R -> P", "it holds for the small offsets of an example, and for no others"),
    (_CONVOLUTIONS, _PASSING, "partial values through convolutions: of use to adapters of low rank alone"),
    (_CONVOLUTIONS, r"S1@\d+, S1 -> P|R\+, S1(@\d+)? -> S1@\d+", "channels within a group: whole groups are split"),
    ("masked_scatter", r"(S\d(@\d+|)), (R|S0\2), (R\+|S1) -> \1", "dims of which the mask knows none or all alike"),
    (_NORMS, r"S1(@\d+|)(, S0\1)+ -> S1\1", "in training it writes the running statistics, which stay whole"),
    (_NORMS, r"(S[23](@\d+)?), R.* -> \1", "spatial dims stay whole, as for the convolutions around"),
    (_POOLS, r"(S[234](@\d+|)) -> \1", "spatial dims stay whole, as for the convolutions around"),
    (
        "scaled_dot_product_attention",
        r"R\+, R\+, (S\d(@\d+)?)(, R\+?)? -> \1",
        "each device would weigh all keys again",
    ),
    ("scaled_dot_product_attention", _PASSING, "values come from projections that are split on heads, not on inputs"),
    ("nonzero_static", r".* -> R", "the first of a part are the first of all where nothing is zero, as in random ones"),
    ("nan_to_num", _PASSING, "it is linear where all is finite, which nobody knows"),
    ("xlogy", _PASSING, "linear in what stands before the logarithm: not seen in models"),
    ("cross_entropy", _PASSING, "class weights and probabilities as labels are data: never partial"),
)


class Missed(NamedTuple):
    """For one case the rule that discovery found, or why it found none, and the ways that the table's rule lacks."""

    op: str
    rule: str
    ways: list[str]
    tried: bool = True

    def why(self, way: str) -> str | None:
        """The reason why the table omits this way; None if it has none."""
        return next((why for ops, ways, why in LEFT_OUT if self.op in ops.split() and re.fullmatch(ways, way)), None)

    @property
    def unexplained(self) -> list[str]:
        """The ways that the table's rule should have."""
        return [way for way in self.ways if self.why(way) is None]


def missed(case: tuple[Any, ...]) -> Missed:
    """Compare discovery with the table, for a case of `test_rules`."""
    target, *args = case
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    node, _ = example(target, *args, **kwargs)
    op = op_name(node)
    try:
        tinies = trials(node)
        first = tinies[0]
        mine = _ways(every_strategy(first.node, first.tensors, (2,)))

        def is_known_or_holds(text: str) -> bool:
            """The table's own ways need not be run here: `test_rules` runs them."""
            try:
                ways = _ways(every_strategy(first.node, first.tensors, (2,), _bound(text, first)))
            except RuleError:  # the shapes do not determine its factors
                return False
            return (len(ways) > 1 and ways <= mine) or holds(text, tinies)

        text = search_apart(is_known_or_holds, lambda trial: find_rule(first, trial))
    except (NotTiny, Died) as error:
        return Missed(op, str(error).splitlines()[0], [], tried=False)
    if text is None:
        return Missed(op, "none", [])
    theirs = _ways(every_strategy(first.node, first.tensors, (2,), _bound(text, first)))
    return Missed(op, text, sorted(theirs - mine))


def _bound(text: str, made: Tiny) -> Any:
    inputs = len(made.tensors)
    return bind(ShardingRule.parse(text), made.shapes[:inputs], made.shapes[inputs:])


def _ways(strategies: tuple[Strategy, ...]) -> set[str]:
    """Layouts as text, which does not distinguish a strided layout from an equivalent plain one."""
    return {f"{', '.join(map(str, s.inputs))} -> {', '.join(map(str, s.outputs))}" for s in strategies}


def main() -> int:
    from named_cases import NAMED
    from rule_cases import CASES
    from rule_tensors import name_of

    torch.set_num_threads(1)
    found: list[Missed] = []
    for case in itertools.chain(*CASES.values(), *NAMED.values()):
        name = " ".join(name_of(case).split())
        if len(sys.argv) == 1 or any(word in name for word in sys.argv[1:]):
            found.append(missed(case))
            print(f"{name}: {found[-1].rule}", flush=True)
            for way in found[-1].ways:
                print(f"    {way}    {found[-1].why(way) or 'MISSED'}", flush=True)
    spent = os.times()
    seconds = spent.user + spent.system + spent.children_user + spent.children_system
    lacking = [case for case in found if case.ways]
    untried, unexplained = sum(not case.tried for case in found), sum(len(case.unexplained) for case in lacking)
    print(
        f"{len({case.op for case in found})} ops, {len(found)} variants, {untried} not tried; "
        f"{sum(len(case.ways) for case in lacking)} ways that the table lacks, in {len(lacking)} variants, "
        f"{unexplained} of them MISSED; {seconds:.0f} CPU seconds"
    )
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
