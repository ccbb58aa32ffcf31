"""What of a module's source decides results: all of it but docstrings, so that a better explanation makes nothing stale."""

import ast
from pathlib import Path


def deciding(path: Path) -> bytes:
    """The module's text without the lines of its docstrings."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        first = node.body[0] if node.body else None
        if ast.get_docstring(node, clean=False) is not None and lines[first.lineno - 1].lstrip().startswith('"""'):
            lines[first.lineno - 1 : first.end_lineno] = [None] * (first.end_lineno - first.lineno + 1)
    return "\n".join(line for line in lines if line is not None).encode()
