"""Measurements on a machine with a GPU that is available for a short time, without a network."""
