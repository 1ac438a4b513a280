# Sourced by the other scripts: sets `root`, and answers -h and --help with the script's first lines.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit 0
fi

# Removes each `--release RELEASE` from the arguments: exports the last one as SGLANG_PD_RELEASE,
# puts all of them in `releases`, and the remaining arguments in `words`.
choose_release() {
    words=() releases=()
    while [[ $# -gt 0 ]]; do
        case $1 in
            --release)
                releases+=("${2:-}")
                [[ $# -eq 1 ]] || shift
                ;;
            --release=*) releases+=("${1#*=}") ;;
            *) words+=("$1") ;;
        esac
        shift
    done
    [[ ${#releases[@]} -eq 0 ]] || SGLANG_PD_RELEASE=${releases[-1]}
    : "${SGLANG_PD_RELEASE=$(<"$root/scripts/default_release")}"
    for release in "${releases[@]}" "$SGLANG_PD_RELEASE"; do
        if [[ $release != [0-9]* || ! -f $root/scripts/requirements/$release.txt ]]; then
            known=$(cd "$root/scripts/requirements" && ls -- [0-9]*.txt | sed 's/\.txt$//' | paste -sd ' ')
            echo "${0##*/}: --release is '$release', expected one of: $known" >&2
            exit 2
        fi
    done
    export SGLANG_PD_RELEASE
}

# Puts all releases in `releases`, the chosen one first.
all_releases() {
    releases=("$SGLANG_PD_RELEASE")
    for file in "$root"/scripts/requirements/[0-9]*.txt; do
        name=$(basename "$file" .txt)
        [[ $name == "$SGLANG_PD_RELEASE" ]] || releases+=("$name")
    done
}
