# `make demo` or `make test` is all a fresh machine needs; both set up first.
PYTHON ?= python3.11
BIN := .venv/bin

# Without bytecode every process that a test starts would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo time-demo demo-vllm test test-all test-fast package image sign test-vllm test-sglang check-vllm check-sglang check check-sentinels lint format reference manifests test-charts test-pythons hashes audit clean

install: .venv/.installed

# Without an NVIDIA GPU the CPU build of torch comes first, where the index in use has it: it satisfies
# the pin, and the CUDA packages of the public index (GBs) stay away.
TORCH := torch==$(shell sed -n 's/^torch==//p' constraints.txt)+cpu
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.venv/.demo: pyproject.toml constraints.txt
	@echo "Setting up .venv (a few minutes the first time) ..."
	$(PYTHON) -m venv .venv
	@test -e /dev/nvidiactl || $(BIN)/python -m pip install --disable-pip-version-check --no-deps $(TORCH) \
		|| echo "No CPU build of torch in this index: PIP_EXTRA_INDEX_URL can name PyTorch's."
	$(PIP_INSTALL) --editable '.[engine,report]'
	@touch $@

.venv/.installed: .venv/.demo
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

demo: .venv/.demo
	$(BIN)/kvrs lab demo

# How long a first try takes: a fresh clone, its installation with pip's cache, and the demo.
time-demo: install
	$(BIN)/python -m experiments.first_minutes.demo

# The same before real vLLM on this machine's CPU: one stream, whose server is killed.
# A quarter of an hour with the installation (3 GB), three minutes without.
demo-vllm: install .venv-vllm/.installed
	KVRS_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python OMP_NUM_THREADS=1 \
		$(BIN)/python -m experiments.demo_vllm.run --out out/demo-vllm

# In parallel: each group of tests that wait more than they compute (FIRST_GROUPS of tests/conftest.py)
# in one worker, every other file in a worker that is free. One worker more than cores, for the same
# reason.
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder \
	--max-worker-restart 0

test: install
	$(PYTEST) -m "not (nightly or package)"

# And what takes long: hosts in network namespaces, kills of ranks, the table of faults in clusters of
# real processes, DistServe on Ray, real vLLM, tests of experiments, and ten times the
# examples of each property. Before a release, and before an issue counts as resolved.
test-all: install
	KVRS_EXAMPLES=10 $(PYTEST) -m "not package"
	$(MAKE) test-vllm
	$(MAKE) test-sglang

# Pure packages and unit tests: no processes, no sockets, no engine, no simulated worlds by the hundred.
SLOW_FOLDERS := backends cluster distserve_patches engine networks sglang sim vllm

test-fast: install
	$(PYTEST) -m "not (nightly or process or network or engine or distserve or vllm or sglang or gpu or package)" \
		$(SLOW_FOLDERS:%=--ignore=tests/%)

# The wheel, built from the sdist and installed without extras into an empty environment; both stay in
# out/package with a bill of materials, the chart, the image where one can be built, hashes, and a
# signature by SIGNING_KEY (an SSH key). After lint: for a moment the sdist lies in the checkout, where
# ruff would see it.
PACKAGE ?= out/package
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' kvrs/__init__.py)

package: lint
	rm -rf $(PACKAGE) && mkdir -p $(PACKAGE)
	KVRS_PACKAGE_DIR=$(abspath $(PACKAGE)) $(BIN)/python -m pytest -q -s -rs -m package tests/packaging
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed \
		--report out/package-report.json --constraint constraints.txt $(PACKAGE)/*.whl
	$(BIN)/python -m tests.packaging.bill out/package-report.json > $(PACKAGE)/sbom.cdx.json
	tar --create --gzip --sort=name --owner=0 --group=0 --transform 's,^deploy/helm,kvrs,' \
		--file $(PACKAGE)/kvrs-chart-$(VERSION).tgz deploy/helm
	$(MAKE) --no-print-directory image sign

image:
	@mkdir -p $(PACKAGE)
	@if command -v buildah > /dev/null; then \
		buildah build --file deploy/Dockerfile --tag kvrs:$(VERSION) . \
		&& buildah push kvrs:$(VERSION) docker-archive:$(PACKAGE)/kvrs-image-$(VERSION).tar:kvrs:$(VERSION); \
	elif docker info > /dev/null 2>&1; then \
		docker build --file deploy/Dockerfile --tag kvrs:$(VERSION) . \
		&& docker save --output $(PACKAGE)/kvrs-image-$(VERSION).tar kvrs:$(VERSION); \
	else echo "No image: here is neither buildah nor an engine of docker."; fi

sign:
	cd $(PACKAGE) && rm -f SHA256SUMS* && sha256sum * > SHA256SUMS
	@if [ -z "$(SIGNING_KEY)" ]; then echo "Not signed: SIGNING_KEY=FILE names an SSH key that signs."; \
	else ssh-keygen -Y sign -n kvrs -f $(SIGNING_KEY) $(PACKAGE)/SHA256SUMS; fi

# Real vLLM on this machine's CPU, in an environment of its own (3 GB): most of an hour on two cores.
test-vllm: install .venv-vllm/.installed
	KVRS_VLLM_PYTHON=$(CURDIR)/.venv-vllm/bin/python OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest -s -m vllm tests/backends tests/vllm

.venv-vllm/.installed: tests/vllm/install.sh tests/vllm/requirements.txt
	@echo "Setting up .venv-vllm (a few minutes, 3 GB) ..."
	PYTHON=$(PYTHON) tests/vllm/install.sh .venv-vllm
	@touch $@

# Real SGLang on this machine's CPU, prefill and decode apart, in an environment of its own (3 GB). Its transfer
# engine listens on all interfaces: where a network of its own can be made, it is the only one that hears it.
test-sglang: install .venv-sglang/.installed
	KVRS_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python OMP_NUM_THREADS=1 $(ALONE) \
		$(BIN)/python -m pytest -s -m sglang tests/backends tests/sglang

ALONE := $(shell unshare --net true 2>/dev/null && echo 'unshare --net sh -c '"'"'ip link set lo up && exec "$$@"'"'"' sh env')

.venv-sglang/.installed: tests/sglang/install.sh tests/sglang/requirements.txt
	@echo "Setting up .venv-sglang (a few minutes, 3 GB) ..."
	PYTHON=$(PYTHON) tests/sglang/install.sh .venv-sglang
	@touch $@

# The contract, and a proxy before real servers, of another version of an engine: `make check-vllm
# ENGINE_VERSION=0.33.0` in an environment of its own (3 GB), or in that of KVRS_VLLM_PYTHON.
CHECKED = KVRS_$(shell echo $* | tr a-z A-Z)_PYTHON

check-vllm check-sglang: check-%: install
	@test -n "$(ENGINE_VERSION)$($(CHECKED))" || { echo "got neither ENGINE_VERSION nor $(CHECKED)" >&2; exit 2; }
	$(if $(ENGINE_VERSION),PYTHON=$(PYTHON) tests/$*/install.sh .venv-$*-$(ENGINE_VERSION) $(ENGINE_VERSION))
	$(if $(ENGINE_VERSION),$(CHECKED)=$(CURDIR)/.venv-$*-$(ENGINE_VERSION)/bin/python) OMP_NUM_THREADS=1 \
		$(if $(filter sglang,$*),$(ALONE)) $(BIN)/python -m pytest -s -m $* \
		tests/backends/test_backend_contract.py tests/$*/test_$*_proxy.py

# The same simulations in other minor versions of Python, where they are installed.
OTHER_PYTHONS ?= $(foreach version,3.12 3.13,$(if $(shell python$(version) -V 2>/dev/null),$(version)))

test-pythons: install $(OTHER_PYTHONS:%=.venv-%/.installed)
	KVRS_OTHER_PYTHONS="$(OTHER_PYTHONS:%=$(CURDIR)/.venv-%/bin/python)" \
		$(BIN)/python -m pytest -q tests/sim/test_determinism.py

.venv-3.%/.installed: pyproject.toml constraints.txt
	python3.$* -m venv .venv-3.$*
	.venv-3.$*/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable . pytest
	@touch $@

# out/hashes.txt: what the index in use gives, for `pip install --require-hashes -r`.
hashes: install
	@mkdir -p out
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report out/pip-report.json \
		--constraint constraints.txt '.[dev]'
	$(BIN)/python -m tests.packaging.hashes out/pip-report.json > out/hashes.txt

# Known vulnerabilities of the pinned versions, by the package index. It needs the network, so nothing
# else depends on it; --strict, because a package that cannot be asked for would count as good. The
# program has an environment of its own: what it requires is pinned nowhere.
audit: .venv-audit/.installed
	.venv-audit/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip

.venv-audit/.installed:
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --disable-pip-version-check 'pip-audit>=2.10,<3'
	@touch $@

# And how many files, functions, lines and changes of file a request and a death walk through, which may
# only fall (experiments/request_path/most.json).
check: lint
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_tidy.py
	$(BIN)/python -m experiments.request_path.gauge --check

# Exact figures in virtual time against their kept values: a minute and a half of one core. A change that
# is meant is kept by `python -m experiments.sentinels.check --update`, in the commit that makes it.
SENTINEL_JOBS ?= 1

check-sentinels: install
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.sentinels.check --jobs $(SENTINEL_JOBS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The example and docs/guide/configuration.md, from the settings classes.
reference: install
	$(BIN)/python -m tools.reference

# The plain manifest is the chart's, for those without helm. This needs helm itself.
manifests:
	{ sed '/^---/,$$d' deploy/kubernetes/kvrs.yaml; helm template kvrs deploy/helm --namespace default \
		--set 'model.volume.persistentVolumeClaim.claimName=model,model.volume.persistentVolumeClaim.readOnly=true'; } \
		> out.yaml && mv out.yaml deploy/kubernetes/kvrs.yaml

# The chart as helm's library renders it, and the schemas of Kubernetes: 350 MB of their own.
test-charts: install .venv-charts/.installed
	$(BIN)/python -m pytest -q tests/packaging/test_helm.py tests/packaging/test_deploy.py

.venv-charts/.installed:
	$(PYTHON) -m venv .venv-charts
	.venv-charts/bin/python -m pip install --disable-pip-version-check helm-python-sdk==0.2.2 kubernetes-validate==1.37.0
	@touch $@

clean:
	rm -rf .venv .venv-* out
