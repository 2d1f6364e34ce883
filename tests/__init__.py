"""The tests, in the folders of what they test.

They start a few hundred interpreters. Where Python is told to keep no compiled modules, each of them compiles torch
again, which takes as long as its import: so those of the tests keep theirs beside the cache of pytest.
"""

import os
import sys
from pathlib import Path

if sys.dont_write_bytecode:
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
