"""`savable convert` from a checkout: `python tools/convert.py SRC DST`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from savable_pipeline.tools.cli.main import app

if __name__ == "__main__":
    app(["convert", *sys.argv[1:]], prog_name="savable")
