#!/usr/bin/env bash
# Measure what this project claims, and write docs/evidence/RELEASE.md from the measurements.
#
# usage: scripts/evidence.sh [--release RELEASE]
#                            [setup|demo|tests|nightly|planning|cpu-copy|serve|verify|scale|report...]
#
#   setup    scripts/setup.sh in a fresh copy of the checkout, cold and warm, and its size
#   demo     scripts/demo.sh on the patched engine and with --stock
#   tests    scripts/test.sh; serving scenarios and faults are recorded
#   nightly  scripts/test.sh --nightly; the soaks and attacks are recorded, too
#   planning scripts/bench.sh plan; take it on a quiet machine
#   cpu-copy scripts/bench.sh cpu-copy; as well
#   serve    scripts/bench.sh serve; as well
#   verify   scripts/bench.sh verify; as well
#   scale    scripts/bench.sh scale; as well
#   report   docs/evidence/RELEASE.md and scale-RELEASE.svg from what was measured last
#
# Without a step: all of them, about four hours on two cores; what is measured is in
# .pd-env/RELEASE/evidence, and with the report in docs/evidence/RELEASE, so that the next report
# has it, too, wherever it is made. Without a release: the default one.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/scripts/release.sh"
choose_release "$@"
set -- "${words[@]}"
"$root/scripts/setup.sh"
exec "$root/.pd-env/$SGLANG_PD_RELEASE/stock/bin/python" "$root/scripts/evidence.py" "$@"
