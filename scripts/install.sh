#!/usr/bin/env bash
# Makes .venv from requirements.lock and installs the project into it, editable; does nothing when that is done.
# Usage: scripts/install.sh [the make target to name in messages]
set -euo pipefail
cd "$(dirname "$0")/.."

# The folder is part of the stamp because a virtual environment does not survive being moved or copied.
wanted="$(pwd) $(cat requirements.lock pyproject.toml scripts/install.sh | cksum) ${PYTHON:-}"
stamp=.venv/.installed
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

python="$(scripts/find_python.sh "${1:-install}")"
echo "installing into .venv with $python ($("$python" --version 2>&1)); the first time takes a minute or two"
# An environment of this folder and this Python is brought up to date, any other is made anew.
if [ "$(cat .venv/.base 2>/dev/null)" != "$(pwd) $python" ] || ! .venv/bin/python -c '' 2>/dev/null; then
    rm -rf .venv
    "$python" -m venv .venv
    echo "$(pwd) $python" >.venv/.base
fi
rm -f "$stamp"
pip() { .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
pip install --no-deps --requirement requirements.lock
pip install --no-deps --no-build-isolation --editable .
echo "$wanted" >"$stamp"
