"""Suggestions for a name pattern that matches nothing."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

_WILD = frozenset("*?[")


def did_you_mean(pattern: str, names: Iterable[str]) -> str:
    """The end of a message that says that nothing has this name; empty where no name is close.

    Tried first are patterns with more before or after the given one (its submodules, or the same name anywhere), then
    corrected spelling.

    >>> did_you_mean("head", ["head.weight"])
    ": did you mean 'head.*'?"
    >>> did_you_mean("layer.*.wieght", ["layers.0.weight"])
    ": did you mean 'layers.*.weight'?"
    >>> did_you_mean("A.weight", ["b.weight", "a.weight"])
    ": did you mean 'a.weight'?"
    >>> did_you_mean("decoder", ["head.weight"])
    ''
    """
    unique_names = list(dict.fromkeys(names))
    spelt = _spelt(pattern, {word for name in unique_names for word in name.split(".")})
    wider = (
        candidate for candidate in _wider(pattern, spelt) if any(fnmatchcase(name, candidate) for name in unique_names)
    )
    near = next(wider, None) or next(iter(difflib.get_close_matches(pattern, unique_names, n=1)), None)
    return f": did you mean '{near}'?" if near is not None else ""


def _wider(*patterns: str) -> Iterator[str]:
    for pattern in dict.fromkeys(patterns):
        yield from (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")


def _spelt(pattern: str, words: Collection[str]) -> str:
    """The pattern, with each word that occurs in no name replaced by the closest one."""
    return ".".join(word if _WILD & set(word) else _nearest(word, words) for word in pattern.split("."))


def _nearest(word: str, words: Collection[str]) -> str:
    if word in words:
        return word
    same_letters = [candidate for candidate in sorted(words) if candidate.lower() == word.lower()]
    return next(iter(same_letters or difflib.get_close_matches(word, sorted(words), n=1)), word)
