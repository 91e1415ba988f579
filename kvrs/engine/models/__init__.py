"""Model families: one class each, with `forward(step, pool) -> logits`. `ModelConfig.family` says which one a directory needs."""
