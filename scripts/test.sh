#!/usr/bin/env bash
# Set up, lint, and run the tests; further arguments go to pytest.
#
# usage: scripts/test.sh [--nightly] [PYTEST ARGUMENT...]
#
#   scripts/test.sh                      everything that fits into an ordinary CI run
#   scripts/test.sh --nightly            everything
#   scripts/test.sh test/unit -k wire    a part
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

select=(-m "not nightly")
if [[ ${1:-} == --nightly ]]; then
    select=()
    shift
fi

scripts/setup.sh
.pd-env/base/bin/ruff check .
.pd-env/base/bin/ruff format --check .
exec scripts/cpu_host.sh --engine patched pytest "${select[@]}" "$@"
