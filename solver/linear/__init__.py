"""Mixed-integer linear programs, their relaxations, HiGHS and CBC: nothing here knows of planning."""
