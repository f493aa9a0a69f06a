"""Measures what vLLM's own threads spend in kvdepot."""

import os

# vLLM logs to the same output, on which --json has one object a line and nothing else.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
