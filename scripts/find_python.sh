#!/usr/bin/env bash
# Prints the path of a Python that Levanter supports (3.12 or 3.13) and that can make virtual environments, or one line
# saying what was looked at. PYTHON=/path/to/python overrides the search.
set -uo pipefail

# A candidate is run, not just found: a version manager's shim exists for versions that are not selected.
executable_of() {
    "$1" -c 'import sys, ensurepip, venv
sys.exit(print(sys.executable) if (3, 12) <= sys.version_info < (3, 14) else 1)' 2>/dev/null </dev/null
}

if [ -n "${PYTHON:-}" ]; then
    executable_of "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13 with the venv module; give the path of one, or unset PYTHON" >&2
    exit 1
fi

uv_versions="${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"
pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
for candidate in python3.12 python3.13 python3 \
    "$uv_versions"/cpython-3.1[23]*/bin/python3 "$pyenv_versions"/3.1[23]*/bin/python3; do
    executable_of "$candidate" && exit 0
done
echo "no Python 3.12 or 3.13 among python3.12, python3.13, python3, $uv_versions and $pyenv_versions;" \
    "install one, or name it: PYTHON=/path/to/python make ${1:-install}" >&2
exit 1
