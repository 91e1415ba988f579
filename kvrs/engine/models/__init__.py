"""Models: Llama, Qwen2, Qwen3 and OPT, all of them one decoder (`decoder.py`) made of different
parts.

Another family needs a reading of its config.json (`config.py`), the names of its tensors
(`loading.py`) and any part that is new.
"""
