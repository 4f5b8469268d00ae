"""Tokens of one policy. Content is always plain text here: special tokens are inserted by id, never by spelling (S2)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, cast

import tokenizers

_LONG: Final = 4096  # characters


class TemplateError(ValueError):
    """A tokenizer or chat template that can't be used; the message says where and what to do."""


class Tokenizer:
    """A `tokenizer.json`, read twice: `encode` sees no special tokens in the text, `encode_marked` sees them all.

    Every added token counts as special, whatever its `special` flag says: `<tool_call>` in a file that an agent reads is text.
    """

    def __init__(self, definition: str, folder: Path) -> None:
        self.folder = folder
        data = cast(dict[str, Any], json.loads(definition))
        added_tokens = cast(list[dict[str, Any]], data.get("added_tokens") or [])
        for added in added_tokens:
            added["special"] = True
        marked = json.dumps(data)
        self._marked = tokenizers.Tokenizer.from_str(marked)
        self._plain = tokenizers.Tokenizer.from_str(marked)
        self._plain.encode_special_tokens = True
        self.specials: dict[str, int] = {t["content"]: t["id"] for t in added_tokens}
        self.special_ids: frozenset[int] = frozenset(self.specials.values())
        self.size: int = self._marked.get_vocab_size(with_added_tokens=True)
        self._longest = max((len(t.encode()) for t in self._marked.get_vocab()), default=1)
        self._check()

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: whatever it spells, no special token comes out."""
        if len(text) > _LONG:
            # The batch call lets other threads run meanwhile; the plain one doesn't.
            return list(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def encode_marked(self, text: str) -> list[int]:
        """Ids of text whose special tokens are meant (a template's own output, a test's expectation)."""
        return list(self._marked.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens spelled out."""
        return self._marked.decode(list(ids), skip_special_tokens=False)

    def special(self, text: str) -> int:
        """Id of a special token. Raises TemplateError when the tokenizer lacks it."""
        try:
            return self.specials[text]
        except KeyError:
            known = ", ".join(self.specials) or "none"
            raise TemplateError(f"{self.folder}: the tokenizer has no special token {text!r} (it has: {known})") from None

    def pieces(self, parts: Iterable[int | str]) -> list[int]:
        """Ids of special tokens (int) and plain text (str), each text encoded on its own."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self.encode(part))
        return ids

    def fewest(self, text: str) -> int:
        """A lower bound on the tokens of `text`, without encoding it."""
        return len(text) // self._longest

    def _check(self) -> None:
        for text, id_ in self.specials.items():
            if id_ in self.encode(f"a{text}b {text}"):
                raise TemplateError(f"{self.folder}: special token {text!r} can't be kept out of plain text by this tokenizer (S2)")


def load_tokenizer(path: Path) -> Tokenizer:
    """Tokenizer of a policy folder (or of a `tokenizer.json`). Raises TemplateError."""
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer(file.read_text(encoding="utf-8"), file.parent)
    except OSError as e:
        raise TemplateError(
            f"{file}: can't be read ({e.strerror}); a policy folder holds config.json, tokenizer.json, model.safetensors"
        ) from None
    except TemplateError:
        raise
    except Exception as e:  # noqa: BLE001  (the tokenizers library raises bare Exception)
        raise TemplateError(f"{file}: not a tokenizer: {e}") from None
