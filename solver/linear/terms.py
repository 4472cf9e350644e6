"""Linear expressions and matrix entries that are built up one by one or in arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Array = Any  # a numpy array; its stubs are no more precise about what is computed here
Terms = Mapping[int, float] | Iterable[tuple[int, float]]  # coefficients by variable; those of equal variables add up
_MAX_ENTRIES_LISTED = 30  # a row with more entries is stored as arrays of its own


class Linear:
    """A linear expression in a program's variables; coefficients of the same variable add up.

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
        """Add terms: one variable, or an array of distinct variables."""
        if isinstance(variables, int):
            if coefficients:
                self._single[variables] = self._single.get(variables, 0.0) + float(coefficients)
        elif len(variables):
            self._chunks.append((variables, np.broadcast_to(coefficients, len(variables))))

    def terms(self, factor: float = 1.0) -> tuple[Array, Array]:
        """The variables in order, each once, and their nonzero coefficients times a factor."""
        single = np.array([*self._single], dtype=np.int64), np.array([*self._single.values()], dtype=float)
        variables, coefficients = (np.concatenate(chunks) for chunks in zip(single, *self._chunks, strict=True))
        order, places = np.unique(variables, return_inverse=True)
        sums = factor * np.bincount(places, coefficients, minlength=len(order))
        return order[sums != 0], sums[sums != 0]

    def array(self, columns: int) -> Array:
        """The expression as an array of coefficients of all `columns` variables of a program."""
        coefficients_of_all = np.zeros(columns)
        for variables, coefficients in self._chunks:
            coefficients_of_all[variables] += coefficients
        for variable, coefficient in self._single.items():
            coefficients_of_all[variable] += coefficient
        return coefficients_of_all


def arrays_of(terms: Mapping[int, float]) -> tuple[Array, Array]:
    """The variables of an expression and their coefficients, as arrays."""
    return np.fromiter(terms.keys(), np.int64, len(terms)), np.fromiter(terms.values(), float, len(terms))


class Entries:
    """The matrix entries of a program as it is built: row, column, value."""

    def __init__(self) -> None:
        self._chunks: list[tuple[Array, Array, Array]] = []
        self._single: tuple[list[int], list[int], list[float]] = ([], [], [])

    def add_row(self, row: int, terms: Terms) -> None:
        """Add the entries of one row."""
        sums = terms if isinstance(terms, Mapping) else _added_up(terms)
        if len(sums) > _MAX_ENTRIES_LISTED:
            self.add(row, *arrays_of(sums))
            return
        rows, columns, values = self._single
        rows.extend([row] * len(sums))
        columns.extend(sums.keys())
        values.extend(sums.values())

    def add(self, rows: int | Array, columns: Array, values: float | Array) -> None:
        """Add one entry for each column; `rows` and `values` are given for each or once for all."""
        self._chunks.append((np.broadcast_to(rows, columns.shape), columns, np.broadcast_to(values, columns.shape)))

    def arrays(self, *, added_up: bool = False) -> tuple[Array, Array, Array]:
        """All entries sorted by row, within a row in order of addition, those of `add_row` first; `added_up`: entries
        of the same row and column are summed."""
        rows, columns, values = self._single
        single = np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64), np.array(values, dtype=float)
        all_rows, all_columns, all_values = (
            np.concatenate(chunks) for chunks in zip(single, *self._chunks, strict=True)
        )
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
    sums: dict[int, float] = {}
    for variable, coefficient in terms:
        sums[variable] = sums.get(variable, 0.0) + coefficient
    return sums
