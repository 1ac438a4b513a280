#!/usr/bin/env bash
# Measure what this project claims, and write docs/evidence/RELEASE.md from the measurements.
#
# usage: scripts/evidence.sh [--release RELEASE]
#                            [setup|demo|tests|nightly|planning|cpu-copy|serve|verify|metrics|wire
#                             |heads|scale|report...]
#
#   setup    scripts/setup.sh in a fresh copy of the checkout, cold and warm, and its size
#   demo     scripts/demo.sh on the patched engine and with --stock
#   tests    scripts/test.sh; records serving scenarios and faults
#   nightly  scripts/test.sh --nightly; also records soaks and attacks
#   planning scripts/bench.sh plan, on a quiet machine
#   cpu-copy scripts/bench.sh cpu-copy, likewise
#   serve    scripts/bench.sh serve, likewise
#   verify   scripts/bench.sh verify, likewise
#   metrics  scripts/bench.sh metrics, likewise
#   wire     scripts/bench.sh wire, likewise
#   heads    scripts/bench.sh heads, likewise
#   scale    scripts/bench.sh scale, likewise
#   report   docs/evidence/RELEASE.md and scale-RELEASE.svg from the last measurements; what was not
#            measured is not in it, and each table has its rows' days and machines
#
# Without a step: all of them, about five hours on two cores. Measurements are written to
# .pd-env/RELEASE/evidence; the report also copies them to docs/evidence/RELEASE, where the next
# report finds them on any machine. Without a release: the default one.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/release.sh"
choose_release "$@"
set -- "${words[@]}"
"$root/scripts/setup.sh"
exec "$root/.pd-env/$SGLANG_PD_RELEASE/stock/bin/python" "$root/scripts/evidence.py" "$@"
