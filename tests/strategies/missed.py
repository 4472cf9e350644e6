"""Legal splits that the table's rules miss: discovery run beside the table, op by op.

python tests/strategies/missed.py [WORD ...]     # of the cases whose name has one of the words

What it lists and the table leaves out on purpose:

- how the second tensor of `type_as`, `view_as`, `reshape_as` and `expand_as` lies, of which only dtype or shape count;
  what is partial in `zeros_like` and `new_zeros`, whose results are zeros;
- partial parameters (a norm's bias, an embedding's table): no storage is partial. Partial gradients of a table: it is
  larger than the activations whose gradient would be joined in its place;
- partial values through convolutions, and the channels within a group: of use to adapters of low rank alone;
- `masked_scatter` on dims in which its mask is one long: its local code does not know them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from autopar.strategies.bind import bind
from autopar.strategies.check import every_strategy
from autopar.strategies.discovery.apart import Died, search_apart
from autopar.strategies.discovery.search import find_rule, holds
from autopar.strategies.discovery.tiny import NotTiny, Tiny
from autopar.strategies.discovery.trying import trials
from autopar.strategies.examples import example
from autopar.strategies.rule import ShardingRule
from autopar.strategies.strategy import Strategy


def missed(case: tuple[Any, ...]) -> tuple[str, list[str]]:
    """The rule that discovery finds for a case of `test_rules`, and the ways to split that the table's lacks."""
    target, *args = case
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    node, _ = example(target, *args, **kwargs)
    try:
        tinies = trials(node)
        text = search_apart(lambda text: holds(text, tinies), lambda trial: find_rule(tinies[0], trial))
    except (NotTiny, Died) as error:
        return str(error), []
    if text is None:
        return "none", []
    first = tinies[0]
    mine = _ways(every_strategy(first.node, first.tensors, (2,)))
    theirs = _ways(every_strategy(first.node, first.tensors, (2,), _bound(text, first)))
    return text, sorted(theirs - mine)


def _bound(text: str, made: Tiny) -> Any:
    inputs = len(made.tensors)
    return bind(ShardingRule.parse(text), made.shapes[:inputs], made.shapes[inputs:])


def _ways(strategies: tuple[Strategy, ...]) -> set[str]:
    """Layouts as text; a strided one where a plain one would do is the same to us."""
    return {f"{', '.join(map(str, s.inputs))} -> {', '.join(map(str, s.outputs))}" for s in strategies}


def main() -> None:
    from rule_tensors import name_of
    from test_rules import CASES

    torch.set_num_threads(1)
    for cases in CASES.values():
        for case in cases:
            name = name_of(case)
            if len(sys.argv) == 1 or any(word in name for word in sys.argv[1:]):
                text, ways = missed(case)
                print(f"{name}: {text}", *(f"    {way}" for way in ways), sep="\n", flush=True)


if __name__ == "__main__":
    main()
