#!/usr/bin/env bash
# scripts/check_types.sh BIN
#
# mypy over the package as a user gets it: the sources with the generated stubs of the extension
# modules beside them. BIN is the virtual environment's folder of programs.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath -s "$1")

installed=$(dirname "$("$bin/python" -c 'import kvpool._native as native; print(native.__file__)')")
rm -rf build/types
mkdir -p build/types
cp -r python/kvpool build/types/kvpool
for module in _native _mlx; do
  [ -f "$installed/$module.pyi" ] || { echo "check_types: no $module.pyi in $installed" >&2; exit 1; }
  cp "$installed/$module.pyi" build/types/kvpool/
done
cd build/types
exec "$bin/mypy" --config-file ../../pyproject.toml kvpool
