#!/usr/bin/env bash
# Makes .venv from requirements.lock and installs the project into it, editable; does nothing when that is done.
# Usage: scripts/install.sh [the make target to name in messages]
set -euo pipefail
cd "$(dirname "$0")/.."

# The folder is part of both records because a virtual environment does not survive being moved or copied.
stamp=.venv/.installed
wanted="$(pwd) $(cat requirements.lock pyproject.toml scripts/install.sh | cksum)"
base=.venv/.base

python=
if [ -n "${PYTHON:-}" ] || [ "$(head -n 1 "$base" 2>/dev/null)" != "$(pwd)" ] || ! .venv/bin/python -c '' 2>/dev/null
then
    python="$(scripts/find_python.sh "${1:-install}")"
    if [ "$(cat "$base" 2>/dev/null)" = "$(pwd; echo "$python")" ] && .venv/bin/python -c '' 2>/dev/null; then
        python=
    fi
fi
if [ -z "$python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

if [ -n "$python" ]; then
    echo "making .venv with $python ($("$python" --version 2>&1))"
    rm -rf .venv
    "$python" -m venv .venv
    (pwd; echo "$python") >"$base"
fi
echo "installing requirements.lock into .venv; the first time takes minutes"
rm -f "$stamp"
pip() { .venv/bin/python -m pip --quiet --quiet --disable-pip-version-check "$@"; }
pip install --no-deps --requirement requirements.lock
pip install --no-deps --no-build-isolation --editable .
echo "$wanted" >"$stamp"
