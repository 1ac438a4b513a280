#!/usr/bin/env bash
# Prepare the environments in .pd-env/: see `scripts/setup.sh --help`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# Any Python 3.11 that can create virtual environments will do.
while read -r python; do
    [[ $python == "$root"/.pd-env/* ]] && continue
    if "$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
        exec "$python" "$root/scripts/setup_env.py" "$@"
    fi
done < <(type -aP python3.11 python3 | awk '!seen[$0]++')

echo "setup: no Python 3.11 with venv and ensurepip on PATH (looked for python3.11 and python3)." >&2
echo "setup: install it (Debian: python3.11 and python3.11-venv; or pyenv, uv), then run this script again." >&2
exit 1
