#!/usr/bin/env bash
# scripts/check_types.sh BIN
#
# mypy over the package as a user gets it: the sources with the generated stub of the extension
# beside them. BIN is the virtual environment's folder of programs.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath -s "$1")

stub=$("$bin/python" -c 'import kvpool._native as native; print(native.__file__)' | sed 's/_native.*/_native.pyi/')
[ -f "$stub" ] || { echo "check_types: no stub at $stub" >&2; exit 1; }
rm -rf build/types
mkdir -p build/types
cp -r python/kvpool build/types/kvpool
cp "$stub" build/types/kvpool/_native.pyi
cd build/types
exec "$bin/mypy" --config-file ../../pyproject.toml kvpool
