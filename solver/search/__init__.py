"""The search for the best plan of a program: pruned programs, branch and bound, and the incumbent.

The constants here and in `solver.linear` are sizes, margins and shares of the time. They trade the time of one part of
the search for that of another. Apart from tolerances of arithmetic (`INTEGRALITY`), they do not enter what is proven: a
plan's bound holds with any of them. Each says beside it what it bounds.

`scripts/bench/search_constants.py` halves and doubles them one at a time. Of 42 that were measured so (30 November
2026), none changes the step of the plan of GPT-2 on (2, 4) within 4 GiB, found in 2.0 to 2.9 CPU seconds (2.8 with all
as they are), or that of Llama-3-8B on (8, 8) within 20 GiB, found in 2.0 to 3.2 (2.9). Llama takes longer with two of
them: 5.2 seconds with twice `_FIRST_BUDGET_MARGIN`, and 4.6 with half of `_MAX_CHOICES_SHARE`. Not measured so: limits
in seconds and shares of a time limit, which bind in neither problem, and what concerns only other sizes of programs.
"""
