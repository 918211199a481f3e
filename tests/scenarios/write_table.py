"""Write docs/detection.md anew: `cd /tmp && python .../tests/scenarios/write_table.py`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

# The scenarios import each other as a package; the repository's root must stay off the path.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from scenarios.document import PATH, document  # noqa: E402

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    PATH.write_text(document(), encoding="utf-8")
    print(f"wrote {PATH}")
