#!/usr/bin/env bash
# Set up, apply the patch set, and compare a prefill and a decode server with a single server.
#
# usage: scripts/demo.sh [nixl|ascend] [--stock] [--release RELEASE]
#
#   scripts/demo.sh                  a GQA model, prefill PP 2 -> decode PP 1 over NIXL; status 0 if all tokens and KV are equal
#   scripts/demo.sh ascend           the same with the ascend backend and ASCEND_USE_FIA
#   scripts/demo.sh --stock          on the stock engine: no answer comes within a minute; status 1
#   scripts/demo.sh ascend --stock   on the stock engine: wrong tokens; status 1
#
# With --release 0.5.9: prefill TP 2 -> decode TP 1 over NIXL; an MLA model, PP 2 -> 1, with ascend.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/release.sh"
choose_release "$@"
set -- "${words[@]}"
for word in "$@"; do # check before the set-up, which may take minutes
    if [[ $word != nixl && $word != ascend && $word != --stock ]]; then
        echo "demo: '$word' is not nixl, ascend or --stock; see --help" >&2
        exit 2
    fi
done
"$root/scripts/setup.sh"
exec "$root/.pd-env/$SGLANG_PD_RELEASE/stock/bin/python" -m pd_harness.demo "$@"
