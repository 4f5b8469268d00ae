"""Moved to `rl360.child`."""

from rl360.child import Child as Child
