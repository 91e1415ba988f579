"""What a process asks of its machine: memory, descriptors, files, logs."""
