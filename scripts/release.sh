# Sourced by scripts that know `root`.

# Takes `--release RELEASE` out of the arguments and says it to all that is started; the rest is in
# `words`.
choose_release() {
    words=()
    while [[ $# -gt 0 ]]; do
        case $1 in
            --release)
                SGLANG_PD_RELEASE=${2:-}
                [[ $# -eq 1 ]] || shift
                ;;
            --release=*) SGLANG_PD_RELEASE=${1#*=} ;;
            *) words+=("$1") ;;
        esac
        shift
    done
    : "${SGLANG_PD_RELEASE=$(<"$root/scripts/default_release")}"
    if [[ $SGLANG_PD_RELEASE != [0-9]* || ! -f $root/scripts/requirements/$SGLANG_PD_RELEASE.txt ]]; then
        known=$(cd "$root/scripts/requirements" && ls -- [0-9]*.txt | sed 's/\.txt$//' | paste -sd ' ')
        echo "${0##*/}: --release is '$SGLANG_PD_RELEASE', it must be of: $known" >&2
        exit 2
    fi
    export SGLANG_PD_RELEASE
}
