"""What an archive says about itself, and whether that is true of it.

An archive is a zip file, or the folder that it was unpacked to, with these members:

    journal/manifest.json        this; its `checksum` is over all else that it says, member digests included
    journal/events/NAME.msgpack  messages of one step (or of none) in order, as arrays [seq, nanos, subject, id, schema, traceparent, body]
    recipe.json                  the whole config
    blobs/AB/DIGEST              what those events name
    checkpoints/step-NNNNNN/…    when they were asked for, and with them
    policy/…                     the starting policy, when the run made it

Bodies are the bytes that the journal holds. Keys and passwords are in none of them.
"""

from __future__ import annotations

import re
from typing import IO, Final

import blake3
import msgspec

from rl360.bus.blobs import digest_of
from rl360.bus.codec import DeadLetter
from rl360.journal.source import JournalError

KIND: Final = "rl360-journal"
FORMAT: Final = 1
_CHUNK: Final = 1 << 20
MANIFEST: Final = "journal/manifest.json"
RECIPE: Final = "recipe.json"
POLICY: Final = "policy"
"""Folder of a run, or of an archive: the starting policy, when the run made it (`policy.experts`)."""
_NAME = re.compile(
    r"recipe\.json|journal/events/(run|step-\d{6,})-\d{4}\.msgpack|blobs/[0-9a-f]{2}/[0-9a-f]{64}"
    r"|(checkpoints/step-\d{6}|policy)/(?!.*(^|/)\.\.?(/|$))[\w./-]+",
    re.ASCII,
)


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    blake3: str


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of messages: of one step (-1: of none), how many, their sequences."""

    name: str
    step: int
    messages: int
    first: int
    last: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`steps`: what it was cut to; None: the whole journal up to `last_seq`. `types` counts events. `pruned`: blobs that were gone."""

    kind: str = KIND
    format: int = FORMAT
    run: str
    code_version: str
    config_digest: str
    steps: tuple[int, ...] | None
    last_seq: int
    messages: int
    types: dict[str, int]
    pruned: int
    dead_letters: tuple[DeadLetter, ...]
    segments: tuple[Segment, ...]
    members: dict[str, Member]
    checksum: str = ""

    def sealed(self) -> Manifest:
        """With its checksum."""
        open_ = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(open_, checksum=digest_of(msgspec.json.encode(open_)))


class _Head(msgspec.Struct):
    kind: str = ""
    format: int = 0


def read(data: bytes, where: str) -> Manifest:
    """Raises JournalError naming `where`."""
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.kind != KIND:
            raise JournalError(f"{where} is not an RL360 journal: its {MANIFEST} says {head.kind or 'nothing'!r}")
        if head.format != FORMAT:
            raise JournalError(f"{where} has format {head.format}, this version reads {FORMAT}: use the RL360 version that wrote it")
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as e:
        raise JournalError(f"{where}: {MANIFEST} is damaged: {e}; get the file again") from None
    if manifest != manifest.sealed():
        raise JournalError(f"{where}: {MANIFEST} is not what was written (its checksum differs); get the file again")
    _agrees(manifest, where)
    return manifest


def _agrees(manifest: Manifest, where: str) -> None:
    """Nothing in it leads outside of the folder that it is unpacked to, and it has what it counts."""
    for name, member in manifest.members.items():
        blob = name.rsplit("/", 1)[1] if name.startswith("blobs/") else member.blake3
        if not _NAME.fullmatch(name) or blob != member.blake3:
            raise JournalError(f"{where}: {name!r} does not belong into an RL360 journal")
    missing = {RECIPE, *(s.name for s in manifest.segments)} - manifest.members.keys()
    if missing or manifest.messages != sum(s.messages for s in manifest.segments):
        raise JournalError(f"{where}: {MANIFEST} does not agree with itself ({', '.join(sorted(missing)) or 'messages'})")


def check(name: str, found: Member, member: Member, where: str) -> None:
    """Raises JournalError when what was found under a name is not what was written."""
    if found != member:
        what = f"{found.size} of {member.size} bytes" if found.size != member.size else "other bytes than were written"
        raise JournalError(f"{where}: {name} is damaged ({what}); get the file again")


def copy(source: IO[bytes], target: IO[bytes]) -> Member:
    """Copy to the end; what was copied."""
    hasher, size = blake3.blake3(), 0
    while data := source.read(_CHUNK):
        hasher.update(data)
        target.write(data)
        size += len(data)
    return Member(size, hasher.hexdigest())
