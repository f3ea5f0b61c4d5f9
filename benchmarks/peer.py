"""The published package that the comparison benchmarks measure against.

Installed when first needed into a folder of the build tree, without its dependencies and never into
an environment: kvpool does not depend on it.
"""

from __future__ import annotations

import subprocess
import sys

from harness import ROOT

NAME = "veloxquant-mlx"
VERSION = "0.94.15"
IMPORT = "veloxquant_mlx"
FOLDER = ROOT / "build" / "benchmarks" / f"{NAME}-{VERSION}"


def install() -> None:
    """Makes `import veloxquant_mlx` work in this process."""
    if not (FOLDER / "veloxquant_mlx").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*command, "--target", str(FOLDER), f"{NAME}=={VERSION}"], check=True)
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
