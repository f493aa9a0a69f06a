"""The main job of kvdepot on a real vLLM server, measured: `make demo`."""
