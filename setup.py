"""Packaging. `strategies/` and `solver/` stand at the top level and are imported as `autopar.*`."""

from setuptools import find_packages, setup

rooms = {"autopar.strategies": "strategies", "autopar.solver": "solver"}
# The links autopar/strategies and autopar/solver are left out: each package is built once, from where it stands.
packages = [p for p in find_packages(include=["autopar", "autopar.*"]) if not p.startswith(tuple(rooms))]
for name, folder in rooms.items():
    packages += [name] + [f"{name}.{child}" for child in find_packages(folder)]

setup(packages=packages, package_dir={"autopar": "autopar", **rooms})
