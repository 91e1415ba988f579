"""Facilities of a process on its machine: memory, descriptors, files, garbage collection, logs."""
