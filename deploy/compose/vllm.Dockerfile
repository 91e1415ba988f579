# vLLM's build for processors in the environment of `make test-vllm`, with kvrs. vLLM copies KV between
# a GPU and its CPU tier; `vllm_cpu_tier.py` makes the copies where there is no GPU.
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/*
COPY tests/vllm/install.sh tests/vllm/requirements.txt /tmp/vllm/
RUN PYTHON=python3 bash /tmp/vllm/install.sh /opt/vllm
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvrs ./kvrs
COPY kvrs_engine ./kvrs_engine
COPY kvrs_lab ./kvrs_lab
COPY distserve_patches ./distserve_patches
RUN /opt/vllm/bin/python -m pip install --no-cache-dir '.[vllm]'
COPY kvrs_testkit/vllm_cpu_tier.py /opt/copies/
# The user of the agent, which takes connections of its group.
RUN useradd --uid 10001 --create-home kvrs
USER 10001
ENV PATH=/opt/vllm/bin:$PATH PYTHONPATH=/opt/copies VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
# The command `vllm` looks for a distribution of that name, which this build has not. To compile the
# model takes minutes; with fewer bits another batch has other near-ties, and so other tokens.
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", \
  "--dtype", "float32", "--model", "/models/model", "--host", "0.0.0.0", "--port", "8100"]
