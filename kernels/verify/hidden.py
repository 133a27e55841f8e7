"""The module kernels/verify.py of Hugging Face's distribution, versions 0.16 to 0.18, beside this package.

Both distributions install into one directory `kernels`, where Python takes a package before a module of the same name.
So whoever asks `kernels.verify` for a name of that module finds it through this one.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

HIDDEN = Path(__file__).parents[1] / "verify.py"
NAME = "kernels._hidden_verify"


@functools.cache
def names() -> frozenset[str]:
    """What the hidden module defines, without running it; nothing if there is none."""
    if not HIDDEN.is_file():
        return frozenset()
    body = ast.parse(HIDDEN.read_text()).body
    defined = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned = (node.targets for node in body if isinstance(node, ast.Assign))
    return frozenset(
        defined | {target.id for targets in assigned for target in targets if isinstance(target, ast.Name)}
    )


def attribute(name: str) -> Any:
    """An attribute of the hidden module. Raises AttributeError, or ImportError where that module cannot be imported."""
    if name not in names():
        raise AttributeError(f"module 'kernels.verify' has no attribute {name!r}")
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, HIDDEN)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[NAME]
            raise
    return getattr(sys.modules[NAME], name)
