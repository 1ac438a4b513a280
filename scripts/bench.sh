#!/usr/bin/env bash
# Plan transfers with the stock engine's code and with ours, side by side; see scripts/bench.py.
#
# usage: scripts/bench.sh plan [--json FILE] [--check]
#
#   plan          times and peak memory of both, and their ratios, a few minutes; status 1 if ours is
#                 slower anywhere (by a tenth, for noise), or misses a target
#   --json FILE   the figures, for scripts/evidence.sh
#   --check       only compare what the two sides copy, at small sizes
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "$root/scripts/cpu_host.sh" --engine stock python "$root/scripts/bench.py" "$@"
