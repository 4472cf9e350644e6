"""One sharding rule per op, written as text; from rules follow the strategies of every node."""

if __name__ != "autopar.strategies":
    raise ImportError("import this package as autopar.strategies (pip install -e . from the project's root)")
