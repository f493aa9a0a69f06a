"""Restoring a prompt of llama.cpp's beside computing it."""
