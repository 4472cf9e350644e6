"""Every string of autopar's source, as it appears in messages: formatted values are replaced by `…`."""

from __future__ import annotations

import ast
import os
from pathlib import Path


def messages(root: Path) -> list[str]:
    """The texts of all string literals and f-strings of the packages below `root`; concatenated ones are one text."""
    found: list[str] = []
    for package in ("autopar", "strategies", "solver"):
        for where, _, files in os.walk(root / package):
            for file in sorted(files):
                if file.endswith(".py"):
                    tree = ast.parse((Path(where) / file).read_text())
                    found += [text for node in ast.walk(tree) if (text := _text(node))]
    return found


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + (_text(node.right) or "…") if _text(node.left) else ""
    return ""
