"""docs/methods.md is what its script makes of the registry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_methods_page_is_current() -> None:
    script = ROOT / "scripts" / "methods_page.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
