#!/usr/bin/env bash
# scripts/system_packages.sh SET...
#
# Installs what the named sets lack on Debian or Ubuntu: build (the extension), test (the C++ tests),
# fuzz (the fuzz targets), bench (the C++ benchmarks), blas (a fast BLAS for MLX on the CPU). Quick, and needs neither root nor a
# network, where all is there already.
set -euo pipefail

declare -A sets=(
  [build]="g++ cmake ninja-build python3-venv python3-dev libhwy-dev"
  [test]="libgtest-dev libgmock-dev librapidcheck-dev"
  [fuzz]="clang-19 libclang-rt-19-dev"
  [bench]="libbenchmark-dev"
  [blas]="libopenblas0-pthread"
)

wanted=()
for set in "$@"; do
  [ -n "${sets[$set]:-}" ] || { echo "system_packages: unknown set '$set' (${!sets[*]})" >&2; exit 2; }
  read -ra packages <<<"${sets[$set]}"
  wanted+=("${packages[@]}")
done

if ! command -v dpkg-query >/dev/null; then
  echo "system_packages: not Debian or Ubuntu; going on, with these expected: ${wanted[*]}" >&2
  exit 0
fi

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  if sudo -n true 2>/dev/null; then
    as_root=(sudo)
  else
    printf '%s\n' "Some system packages are missing, and installing them takes root. Run" \
      "    sudo apt-get install ${missing[*]}" "and then this command again." >&2
    exit 1
  fi
fi
echo "Installing ${missing[*]}"
"${as_root[@]}" apt-get update -q
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -q -y --no-install-recommends "${missing[@]}"
