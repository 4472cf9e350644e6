"""The solver: strategies and costs become one integer program, whose optimum is the plan."""

if __name__ != "autopar.solver":
    raise ImportError("import this package as autopar.solver (pip install -e . from the project's root)")

from autopar.solver.make import make_plan
from autopar.solver.model_graph import ModelGraph
from autopar.solver.problem import Problem
from autopar.solver.solution import Solution

__all__ = ["ModelGraph", "Problem", "Solution", "make_plan"]
