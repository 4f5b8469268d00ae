"""Optional dependencies: the base install is light, and what needs more says which extra to install."""

from __future__ import annotations

from rl360.errors import InputError


class MissingExtra(InputError, ImportError):
    """A part of RL360 needs a package that an extra installs."""

    def __init__(self, who: str, missing: str, extra: str) -> None:
        super().__init__(f"{who} needs {missing}, which is not installed: pip install 'rl360[{extra}]'")
