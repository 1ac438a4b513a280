#!/usr/bin/env bash
# Put one fault at a time into the patch set, and check that scripts/test.sh finds it.
#
# usage: scripts/mutants.sh [--release RELEASE]... [--only WORD] [--check]
#
#   --release RELEASE  faults in this release's own files; without one, of all releases
#   --only WORD        only faults with WORD in their name, file or tests
#   --check            only check that each fault can be applied
#
# Half an hour per release on two cores; status 1 if a fault is not found. See scripts/mutants.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/release.sh"
choose_release "$@"
[[ ${#releases[@]} -gt 0 ]] || all_releases
"$root/scripts/setup.sh" stock "${releases[@]/#/--release=}"
exec "$root/.pd-env/base/bin/python" "$root/scripts/mutants.py" "${words[@]}" "${releases[@]}"
