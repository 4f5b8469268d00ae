"""Sandboxes of a Docker daemon: one container for the agent, one for each sealed run, and a volume that both see as the workdir."""
