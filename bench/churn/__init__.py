"""Prompts that come again, on real vLLM with a depot that is too small for all of them."""
