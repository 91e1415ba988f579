# vLLM with kvrs in it, for vllm.yaml and machines.yaml. In a clone:
#   docker build -f deploy/kubernetes/vllm.Dockerfile -t vllm-kvrs:0.32.0 .
FROM vllm/vllm-openai:v0.32.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY kvrs ./kvrs
COPY kvrs_engine ./kvrs_engine
COPY kvrs_lab ./kvrs_lab
COPY distserve_patches ./distserve_patches
RUN pip install --no-cache-dir '.[vllm]'
# The agent's user: it passes its memory to the agent in a directory that its group may enter.
RUN useradd --uid 10001 --create-home kvrs
USER 10001
