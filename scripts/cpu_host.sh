#!/usr/bin/env bash
# usage: scripts/cpu_host.sh [--release RELEASE] [--engine stock|patched] COMMAND [ARGUMENT...]
#
# Runs COMMAND where the published engine (stock) or the engine with this patch set (patched, the
# default) is installed, with the CPU host active: on a machine without an accelerator. Prepares the
# environment on first use (minutes) and whenever the patch set has changed (seconds); see
# scripts/setup.sh --help for releases.
#
#   scripts/cpu_host.sh python -m sglang.launch_server --model-path MODEL --device cpu --tp 2
#   scripts/cpu_host.sh --engine stock pytest test/serving -k tp2_to_1
#   scripts/cpu_host.sh --release 0.5.23 pytest test/transport
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/release.sh"

engine=patched
given=()
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --engine) engine=${2:-}; shift; [[ $# -gt 0 ]] && shift ;;
        --engine=*) engine=${1#*=}; shift ;;
        --release) given=(--release "${2:-}"); shift; [[ $# -gt 0 ]] && shift ;;
        --release=*) given=("$1"); shift ;;
        *) break ;;
    esac
done
if [[ $engine != stock && $engine != patched ]]; then
    echo "cpu_host: --engine is '$engine', expected stock or patched" >&2
    exit 2
fi
choose_release "${given[@]}"
if [[ $# -eq 0 ]]; then
    usage >&2
    exit 2
fi

"$root/scripts/setup.sh" "$engine"

base=$root/.pd-env/base
environment=$root/.pd-env/$SGLANG_PD_RELEASE/$engine
# A Python program of base must run under the environment's Python, which has the engine.
if [[ -f $base/bin/$1 ]] && IFS= read -r first <"$base/bin/$1" && [[ $first == "#!"*python* ]]; then
    set -- "$environment/bin/python" "$base/bin/$1" "${@:2}"
fi
while IFS= read -r setting; do
    export "${setting?}"
done < <(PYTHONPATH=$root/python "$environment/bin/python" -m pd_harness.cpu_host)
export PATH=$environment/bin:$base/bin:$PATH
exec "$@"
