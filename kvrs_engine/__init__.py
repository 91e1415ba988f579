"""The embedded engine: what it computes with, and its parts that decide."""
