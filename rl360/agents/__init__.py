"""Attempts: tasks in Harbor's format, sandboxes, agents, the verifier, and the runner that joins them."""
