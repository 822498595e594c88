"""Access to `megalite._C`, the optional compiled extension (csrc/).

Invariant: nothing needs it. Callers take `load()` and fall back to numpy or torch when it is None; `why_missing()` says
what the build recorded. This file and kernels/ are the only places that may guard an import.
"""

import importlib
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

BUILD_INFO = Path(__file__).parent / "_build_info.json"


@cache
def _import() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("megalite._C"), ""
    except ImportError as error:
        return None, str(error)


def load() -> ModuleType | None:
    """The extension, or None where it was not built; never raises.

    Its functions take and return numpy arrays and raise ValueError for bad sizes:
    sample_index(lengths int32 (docs,), order int64 (n,), seq_len) -> int64 (samples + 1, 2);
    blend_index(weights float64 (k,), num) -> (dataset int16 (num,), sample int64 (num,));
    philox_words(key0, key1, start, num, stream=0) -> two uint32 (num,).
    """
    return _import()[0]


def build_info() -> dict[str, Any]:
    """What setup.py recorded: built, cuda, compiler, nvcc, error; empty when it never ran."""
    return json.loads(BUILD_INFO.read_text()) if BUILD_INFO.exists() else {}


def why_missing() -> str | None:
    """One text for the user on why the extension is absent, or None when it is there."""
    module, error = _import()
    if module is not None:
        return None
    recorded = build_info().get("error")
    return f"{error}; the build said: {recorded}" if recorded else f"{error}; it was never built (pip install -e .)"
