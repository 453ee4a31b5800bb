#!/usr/bin/env bash
# Makes .venv-torch from requirements-torch.lock with a Python 3.11; does nothing when that is done.
# A separate environment because PyTorch for Python 3.12 may bring gigabytes of CUDA, and training needs no PyTorch.
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv-torch/.installed
wanted="$(pwd) $(cat requirements-torch.lock scripts/install_torch.sh | cksum)"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && .venv-torch/bin/python -c '' 2>/dev/null; then
    exit 0
fi

executable_of() {
    "$1" -c 'import sys, ensurepip, venv
sys.exit(print(sys.executable) if sys.version_info[:2] == (3, 11) else 1)' 2>/dev/null </dev/null
}

python=
uv_versions="${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-$HOME/.local/share}/uv/python}"
pyenv_versions="${PYENV_ROOT:-$HOME/.pyenv}/versions"
for candidate in ${TORCH_PYTHON:-python3.11 "$uv_versions"/cpython-3.11*/bin/python3 "$pyenv_versions"/3.11*/bin/python3}
do
    python="$(executable_of "$candidate")" && break
done
if [ -z "$python" ]; then
    echo "no Python 3.11 among ${TORCH_PYTHON:-python3.11, $uv_versions and $pyenv_versions};" \
        "install one, or name it: TORCH_PYTHON=/path/to/python3.11 make test-torch" >&2
    exit 1
fi
echo "making .venv-torch with $python and installing requirements-torch.lock; the first time takes a minute"
rm -rf .venv-torch
"$python" -m venv .venv-torch
.venv-torch/bin/python -m pip --quiet --quiet --disable-pip-version-check install --no-deps \
    --requirement requirements-torch.lock
echo "$wanted" >"$stamp"
