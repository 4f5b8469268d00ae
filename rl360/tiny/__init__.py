"""The small shell tasks and the starting policy: what the laptop's run learns, and from where."""

from __future__ import annotations

from pathlib import Path


def policy_folder() -> Path:
    """The shipped starting policy, in Hugging Face's layout. `rl360.tiny.warmstart` remakes it."""
    return Path(__file__).parent / "policy"
