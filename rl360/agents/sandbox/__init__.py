"""Places where an agent's commands run: `bwrap` (namespaces and cgroups), and `subprocess` only when asked for by name."""
