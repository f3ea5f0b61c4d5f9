"""docs/block_table.svg is what its script draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_picture_of_a_block_table_is_current() -> None:
    script = ROOT / "scripts" / "paging_picture.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
