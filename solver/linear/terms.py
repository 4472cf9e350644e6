"""Sums of terms and entries of rows, as they come: one by one, or by the thousand in arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Array = Any  # of numpy; its stubs say no more about what is computed here
Terms = Mapping[int, float] | Iterable[tuple[int, float]]  # by variable, or pairs of which equal variables add up
_MANY = 30  # entries of a row: so many are an array of their own


class Linear:
    """A linear expression in a program's variables; terms of one variable add up.

    >>> some = Linear({3: 1.0})
    >>> some.add(np.array([1, 3]), np.array([2.0, 0.5]))
    >>> some.array(4).tolist()
    [0.0, 2.0, 0.0, 1.5]
    """

    def __init__(self, terms: Mapping[int, float] | None = None) -> None:
        self._chunks: list[tuple[Array, Array]] = []
        self._single: dict[int, float] = dict(terms or {})

    def __bool__(self) -> bool:
        return bool(self._single) or bool(self._chunks)

    def add(self, variables: int | Array, coefficients: float | Array) -> None:
        """Add terms, of one variable or of many different ones."""
        if isinstance(variables, int):
            if coefficients:
                self._single[variables] = self._single.get(variables, 0.0) + float(coefficients)
        elif len(variables):
            self._chunks.append((variables, np.broadcast_to(coefficients, len(variables))))

    def terms(self, factor: float = 1.0) -> tuple[Array, Array]:
        """The variables in order, each once, and their coefficients times a factor; none is 0."""
        single = np.array([*self._single], dtype=np.int64), np.array([*self._single.values()], dtype=float)
        variables, coefficients = (np.concatenate(some) for some in zip(single, *self._chunks, strict=True))
        found, places = np.unique(variables, return_inverse=True)
        sums = factor * np.bincount(places, coefficients, minlength=len(found))
        return found[sums != 0], sums[sums != 0]

    def array(self, columns: int) -> Array:
        """The coefficients of all variables of a program."""
        found = np.zeros(columns)
        for variables, coefficients in self._chunks:
            found[variables] += coefficients
        for variable, coefficient in self._single.items():
            found[variable] += coefficient
        return found


def arrays_of(terms: Mapping[int, float]) -> tuple[Array, Array]:
    """The variables of an expression, and their coefficients."""
    return np.fromiter(terms.keys(), np.int64, len(terms)), np.fromiter(terms.values(), float, len(terms))


class Entries:
    """The matrix of a program as it grows: row, column, value."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Array, Array, Array]] = []
        self._single: tuple[list[int], list[int], list[float]] = ([], [], [])

    def one(self, row: int, terms: Terms) -> None:
        """The entries of one row."""
        found = terms if isinstance(terms, Mapping) else _added_up(terms)
        if len(found) > _MANY:
            self.many(row, *arrays_of(found))
            return
        rows, columns, values = self._single
        rows.extend([row] * len(found))
        columns.extend(found.keys())
        values.extend(found.values())

    def many(self, rows: int | Array, columns: Array, values: float | Array) -> None:
        """One entry for each column; rows and values one each, or one for all."""
        self._chunks.append((np.broadcast_to(rows, columns.shape), columns, np.broadcast_to(values, columns.shape)))

    def arrays(self, *, added_up: bool = False) -> tuple[Array, Array, Array]:
        """By row; within a row as they came, single ones first; `added_up`: those of one row and column are one."""
        rows, columns, values = self._single
        single = np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64), np.array(values, dtype=float)
        all_rows, all_columns, all_values = (np.concatenate(some) for some in zip(single, *self._chunks, strict=True))
        if not np.all(all_rows[1:] >= all_rows[:-1]):
            order = np.argsort(all_rows, kind="stable")
            all_rows, all_columns, all_values = all_rows[order], all_columns[order], all_values[order]
        if added_up and len(all_rows):
            keys = all_rows * (int(all_columns.max()) + 1) + all_columns
            _, first, places = np.unique(keys, return_index=True, return_inverse=True)
            if len(first) < len(keys):
                sums, order = np.bincount(places, all_values), np.argsort(first)
                return all_rows[first[order]], all_columns[first[order]], sums[order]
        return all_rows, all_columns, all_values


def _added_up(terms: Iterable[tuple[int, float]]) -> dict[int, float]:
    found: dict[int, float] = {}
    for variable, coefficient in terms:
        found[variable] = found.get(variable, 0.0) + coefficient
    return found
