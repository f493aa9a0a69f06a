"""Requests at once over one stored prefix."""
