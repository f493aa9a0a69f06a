"""Measures the local server that remembers."""
