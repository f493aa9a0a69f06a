"""What restored KV is worth to vLLM on one CUDA device: time to the first token, and decoding."""
