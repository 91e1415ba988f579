"""Models: Llama, Mixtral, OPT, Qwen2, Qwen3 and Qwen3-MoE, as one decoder (`decoder.py`) with
different parts.

Another family needs a reader of its config.json (`config.py`), the names of its tensors
(`loading.py`) and its new parts.
"""
