#!/usr/bin/env bash
# Rewrites requirements.lock: what pip resolves today for the project, its extras and its build tools.
# It needs the network and takes minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

python="$(scripts/find_python.sh lock)"
environment="$(mktemp -d)"
trap 'rm -rf "$environment"' EXIT
"$python" -m venv "$environment"
# editables is what hatchling asks for to install a checkout in place.
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check ".[dev,plots,serve,eval]" hatchling editables
"$environment/bin/python" -m pip check
{
    echo "# Every package that the project, its extras dev, plots, serve and eval, and its build need, for Python 3.12 and 3.13."
    echo "# Rewrite it with \`make lock\` (scripts/lock.sh), then run \`make test\` before committing it."
    "$environment/bin/python" -m pip freeze --exclude levanter-marin
} >requirements.lock.new
mv requirements.lock.new requirements.lock
