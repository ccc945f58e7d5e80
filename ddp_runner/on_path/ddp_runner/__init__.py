"""Finds the package for whoever has this folder on the search path, and nothing that lies beside the package.

A checkout has folders such as ``tests`` and ``docs``, which would be found before those of a user's.
A package itself, so that ``python -m ddp_runner`` looks for the modules of the other.
"""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

_PACKAGE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))  # noqa: PTH100, PTH118, PTH120 - as in start.py
_SPEC = spec_from_file_location(
    __name__,
    os.path.join(_PACKAGE, "__init__.py"),  # noqa: PTH118
    submodule_search_locations=[_PACKAGE],
)
assert _SPEC is not None
assert _SPEC.loader is not None
# Python gives what stands here to whoever imports this module.
sys.modules[__name__] = module_from_spec(_SPEC)
_SPEC.loader.exec_module(sys.modules[__name__])
