"""The evaluation of a KV store under vLLM, by vLLM's own benchmark module."""
