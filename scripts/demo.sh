#!/usr/bin/env bash
# Set up, apply the patch set, and see prefill TP 2 -> decode TP 1 over NIXL give right tokens.
#
# usage: scripts/demo.sh [--stock]
#
#   scripts/demo.sh           on the patched engine; status 0 if all tokens equal a single server's
#   scripts/demo.sh --stock   on the stock engine: no answer comes within a minute; status 1
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
exec "$root/.pd-env/stock/bin/python" -m sglang_pd.demo "$@"
