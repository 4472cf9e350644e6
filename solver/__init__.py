"""Strategies and costs become one integer program; its optimum is the plan."""

if __name__ != "autopar.solver":
    raise ImportError("import this package as autopar.solver (pip install -e . from the project's root)")
