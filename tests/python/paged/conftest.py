"""The tiny models of the tests of mlx-lm's caches serve here, too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "mlx_lm"))
