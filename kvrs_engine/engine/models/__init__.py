"""Models: Llama, Mixtral, OPT, Qwen2, Qwen3 and Qwen3-MoE, all of them one decoder (`decoder.py`)
made of different parts.

Another family needs a reading of its config.json (`config.py`), the names of its tensors
(`loading.py`) and any part that is new.
"""
