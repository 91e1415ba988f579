#!/usr/bin/env bash
# Makes the environment (first argument) that `make test-sglang` runs real SGLang in: about 3 GB. The second argument is another
# version of SGLang (`make check-sglang`), beside the same packages.
set -euo pipefail
venv=$1 version=${2:-}
here=$(dirname "$0")
"${PYTHON:-python3.11}" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Where pip looks anyway; failing that, PyTorch's own index of CPU builds.
torch=torch==2.13.0+cpu
pip install --no-deps "$torch" || pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
# The list is complete, so that nothing has to be resolved, and nothing comes that it does not name.
pip install --no-deps --requirement "$here/requirements.txt"
if [ -n "$version" ]; then
    pip install --no-deps "sglang==$version"
    pip check | grep -i ^sglang || true  # What it would rather have.
fi

# Mooncake loads these of RDMA also for TCP. Where the system has none, its packages are unpacked beside.
libraries="$venv/libraries"
mkdir -p "$libraries"
if ! ldconfig -p | grep -q libibverbs.so.1; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    (cd "$scratch" && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 && for package in *.deb; do dpkg -x "$package" .; done)
    find "$scratch" -name 'lib*.so*' -exec cp -a {} "$libraries" ';'
fi
