#!/usr/bin/env bash
# Checks and times the MoE layer on one GPU with the interpreter in PYTHON, which has JAX for that GPU. No venv is made
# and nothing installed into the interpreter: WHEELS names a folder, of 64 MiB at most, of wheels that it lacks.
# Arguments go to benchmarks/gpu_check.py. Ends within 8 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
WHEELS="${WHEELS:-}"
MAX_WHEEL_BYTES=$((64 * 1024 * 1024))
LIMIT_SECONDS=480

path="$PWD/src"
if [ -n "$WHEELS" ]; then
    [ -d "$WHEELS" ] || { echo "WHEELS=$WHEELS is no folder" >&2; exit 2; }
    bytes=0
    for wheel in "$WHEELS"/*.whl; do
        [ -e "$wheel" ] || { echo "WHEELS=$WHEELS holds no .whl file" >&2; exit 2; }
        bytes=$((bytes + $(wc -c <"$wheel")))
    done
    if [ "$bytes" -gt "$MAX_WHEEL_BYTES" ]; then
        echo "the wheels in $WHEELS have $bytes bytes, allowed $MAX_WHEEL_BYTES; leave out what $PYTHON already has" >&2
        exit 2
    fi
    unpacked="$(mktemp -d)"
    trap 'rm -rf "$unpacked"' EXIT
    for wheel in "$WHEELS"/*.whl; do
        name="$(basename "$wheel")"
        if ! "$PYTHON" -c 'import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])' "${name%%-*}" 2>/dev/null
        then
            echo "from $WHEELS: $name"
            "$PYTHON" -m zipfile -e "$wheel" "$unpacked"
        fi
    done
    path="$path:$unpacked"
fi

PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 \
    timeout "$LIMIT_SECONDS" "$PYTHON" benchmarks/gpu_check.py "$@"
