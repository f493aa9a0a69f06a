"""Measures what vLLM's own thread spends in kvdepot."""
