#!/usr/bin/env bash
# Set up, lint, and run the tests; further arguments go to pytest.
#
# usage: scripts/test.sh [--release RELEASE]... [--nightly] [PYTEST ARGUMENT...]
#
#   scripts/test.sh                      all tests of an ordinary CI run, for all releases
#   scripts/test.sh --release 0.5.9      the same for one release of the engine
#   scripts/test.sh --nightly            the remaining tests; those marked `alone` run one by one;
#                                        those also marked `waits` run last, three at a time
#   scripts/test.sh test/unit -k wire    some tests, for the default release
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/release.sh"
named=${SGLANG_PD_RELEASE:-}
choose_release "$@"
set -- "${words[@]}"
cd "$root"

# Most tests wait as long as they compute: run three at a time, but a file's tests in sequence.
# Nightly files are long, so only tests that share a fleet run in sequence.
passes=("not nightly") dist=loadfile
if [[ ${1:-} == --nightly ]]; then
    passes=("nightly and not alone" "alone and not waits" "alone and waits") dist=loadgroup
    shift
fi
workers=(-n 3 --no-loadscope-reorder --dist "$dist") whole=1
for argument in "$@"; do
    [[ $argument == test* ]] && workers=() named=$SGLANG_PD_RELEASE whole=
done
if [[ ${#releases[@]} -eq 0 ]]; then
    all_releases
    [[ -z $named ]] || releases=("$SGLANG_PD_RELEASE")
fi

# Without bytecode every server would compile this checkout again, and every worker the tests.
unset PYTHONDONTWRITEBYTECODE

scripts/setup.sh --tests "${releases[@]/#/--release=}"
.pd-env/base/bin/ruff check .
.pd-env/base/bin/ruff format --check .

default=$(<scripts/default_release) failed=0
for release in "${releases[@]}"; do
    # Tests without an engine run with the default release alone.
    suites=()
    [[ $release == "$default" || -z $whole ]] || suites=(test/engine test/transport test/serving)
    for pass in "${passes[@]}"; do
        echo "test: SGLang $release, $pass"
        parallel=("${workers[@]}")
        [[ $pass != "alone and not waits" ]] || parallel=()
        status=0
        scripts/cpu_host.sh --release "$release" --engine patched pytest \
            -m "$pass" "${parallel[@]}" "$@" "${suites[@]}" || status=$?
        # 5: none of the named tests is in this pass.
        [[ $status -eq 0 || ( $status -eq 5 && ${#passes[@]} -gt 1 ) ]] || failed=$status
    done
done
exit "$failed"
