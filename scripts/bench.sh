#!/usr/bin/env bash
# Time the patch set against the code that it replaces; see scripts/bench_*.py.
#
# usage: scripts/bench.sh [--release RELEASE] plan [--json FILE] [--check]
#        scripts/bench.sh cpu-copy [--json FILE]
#        scripts/bench.sh serve [--json FILE] [--only WORD] [--rounds N]
#        scripts/bench.sh verify [--json FILE] [--rounds N]
#        scripts/bench.sh metrics [--json FILE] [--starts N] [--rounds N]
#        scripts/bench.sh wire [--json FILE] [--only WORD] [--device cuda]
#        scripts/bench.sh heads [--json FILE] [--only WORD] [--rounds N]
#        scripts/bench.sh scale [--json FILE] [--only BACKEND] [--ranks N]... [--rounds N]
#
#   plan          times and peak memory of planning a transfer, stock and patched, and their ratios;
#                 for sliding windows also the time that NIXL takes to make the transfer, for KV
#                 heads between TP sizes packed beside sliced and whole pages; a few minutes;
#                 status 1 if patched is slower anywhere (by a tenth) or misses a target
#   cpu-copy      a request's KV to the host and back, against a loop and one memcpy; a minute
#   serve         real pairs of servers, stock and patched in turns: time to the first token and
#                 requests per second; half an hour; status 1 if patched is slower beyond the noise
#   verify        SGLANG_PD_VERIFY: digests against memcpy, and the time to the first token without
#                 and with it; ten minutes
#   metrics       the time to the first token without and with metrics, and with request lines, in
#                 turns; a quarter of an hour; status 1 if they cost over 1 %, and more than equal
#                 servers differ; --starts N starts all servers N times
#   wire          KV heads between TP sizes over NIXL, packed beside sliced and one flat write, by
#                 shared memory and over TCP; a quarter of an hour; status 1 if packed is slower
#   heads         the same on real servers, beside equal TP, in turns: time to the first token of
#                 8,000 tokens, decode's longest pause; ten minutes; status 1 as for wire
#   scale         8 to 64 prefill ranks and as many decode ranks, without a model, stock and patched
#                 in turns: what they cost each other; an hour; status 1 if a figure grows faster
#                 with the number of ranks than in stock
#   --only WORD   only the fleets, backends or (wire) transports, with WORD in their name
#   --rounds N    measure everything N times, stock and patched in turns
#   --ranks N     ranks of each side, a multiple of 4; may be repeated (default: 8, 16, 32, 64)
#   --json FILE   write the figures to FILE, for scripts/evidence.sh
#   --device cuda the pools are on a GPU
#   --check       only compare what the two sides copy, at small sizes
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/release.sh"
choose_release "$@"
set -- "${words[@]}"
case ${1:-} in
    plan) python=("$root/scripts/cpu_host.sh" --engine stock python) ;;
    cpu-copy | verify | wire) python=("$root/scripts/cpu_host.sh" python) ;;
    serve | scale | heads | metrics)
        # `packages` has what makes the models.
        path="$root/python:$root/.pd-env/$SGLANG_PD_RELEASE/packages"
        python=(env "PYTHONPATH=$path" "$root/.pd-env/base/bin/python")
        ;;
    *)
        echo "bench: '${1:-}' is not plan, cpu-copy, serve, verify, metrics, wire, heads or scale; see --help" >&2
        exit 2
        ;;
esac
"$root/scripts/setup.sh"
exec "${python[@]}" "$root/scripts/bench_${1//-/_}.py" "${@:2}"
