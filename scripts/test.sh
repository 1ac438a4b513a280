#!/usr/bin/env bash
# Set up, lint, and run the tests; further arguments go to pytest.
#
# usage: scripts/test.sh [--release RELEASE] [--nightly] [PYTEST ARGUMENT...]
#
#   scripts/test.sh                      everything that fits into an ordinary CI run
#   scripts/test.sh --nightly            everything, one test at a time
#   scripts/test.sh test/unit -k wire    a part, likewise
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/release.sh"
choose_release "$@"
set -- "${words[@]}"
cd "$root"

# Most tests wait as long as they compute: two at a time, those of a file one after the other.
select=(-m "not nightly")
workers=(-n 2 --dist loadfile --no-loadscope-reorder)
if [[ ${1:-} == --nightly ]]; then
    select=() workers=()
    shift
fi
for argument in "$@"; do
    [[ $argument == test* ]] && workers=()
done

scripts/setup.sh
.pd-env/base/bin/ruff check .
.pd-env/base/bin/ruff format --check .
exec scripts/cpu_host.sh --engine patched pytest "${select[@]}" "${workers[@]}" "$@"
