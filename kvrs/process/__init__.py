"""A process and its machine: memory, descriptors, files, garbage, log lines."""
