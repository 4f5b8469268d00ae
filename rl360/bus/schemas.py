"""Published shape of the events: JSON Schema of each, an AsyncAPI document, and the check that a change is compatible.

A change is compatible when every journal recorded under the old shape can still be read: no type goes away, no field
changes type or goes away, and a new field has a default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from rl360 import __version__
from rl360.bus import events as ev
from rl360.bus import nats_server, subjects

EVENTS_FILE: Final = "events.json"
ASYNCAPI_FILE: Final = "asyncapi.json"
Json = dict[str, Any]


def event_schemas() -> Json:
    """JSON Schema of all events, one definition a type."""
    _, components = msgspec.json.schema_components(list(ev.EVENT_TYPES.values()), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "RL360 events",
        "version": ev.SCHEMA_VERSION,
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in sorted(ev.EVENT_TYPES)],
        "$defs": {name: components[name] for name in sorted(components)},
    }


def asyncapi() -> Json:
    """AsyncAPI 3.0 document: one channel a type, and which worker kind sends it."""
    names = sorted(ev.EVENT_TYPES)
    publishers = {n: sorted(k for k, types in nats_server.PUBLISHES.items() if n in types) or ["supervisor"] for n in names}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "RL360 journal",
            "version": __version__,
            "description": "Events of a run on NATS JetStream. Bodies are msgpack of the shapes in events.json, tagged by `type`.",
        },
        "defaultContentType": "application/msgpack",
        "channels": {
            name: {
                "address": subjects.pattern("{run}", step="{step}", type_=name, group="{group}"),
                "parameters": {p: {} for p in ("run", "step", "group")},
                "messages": {name: {"$ref": f"#/components/messages/{name}"}},
            }
            for name in names
        },
        "operations": {
            f"{kind}.{name}": {
                "action": "send",
                "channel": {"$ref": f"#/channels/{name}"},
                "messages": [{"$ref": f"#/channels/{name}/messages/{name}"}],
            }
            for name in names
            for kind in publishers[name]
        },
        "components": {
            "messages": {
                name: {
                    "name": name,
                    "headers": {
                        "type": "object",
                        "properties": {h: {"type": "string"} for h in ("Nats-Msg-Id", "traceparent", "RL360-Schema")},
                    },
                    "payload": {"$ref": f"{EVENTS_FILE}#/$defs/{name}"},
                }
                for name in names
            }
        },
    }


def write_schemas(out: Path) -> list[Path]:
    """Write both documents to a folder; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for name, document in ((EVENTS_FILE, event_schemas()), (ASYNCAPI_FILE, asyncapi())):
        path = out / name
        path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        written.append(path)
    return written


def incompatibilities(old: Json, new: Json) -> list[str]:
    """Why journals of the `old` shape could not be read under the `new` one (empty: compatible)."""
    found: list[str] = []
    before, after = cast(Json, old["$defs"]), cast(Json, new["$defs"])
    for name, shape in before.items():
        if name not in after:
            found.append(f"{name} is gone")
            continue
        found += _changes(name, shape, after[name])
    return found


def _changes(name: str, old: Json, new: Json) -> list[str]:
    found: list[str] = []
    old_fields, new_fields = cast(Json, old.get("properties", {})), cast(Json, new.get("properties", {}))
    for field, shape in old_fields.items():
        if field not in new_fields:
            found.append(f"{name}.{field} is gone")
        elif _kind(shape) != _kind(new_fields[field]):
            found.append(f"{name}.{field} changes from {_kind(shape)} to {_kind(new_fields[field])}")
    found += [f"{name}.{f} is new and has no default" for f in set(new.get("required", [])) - set(old.get("required", []))]
    found += [f"{name} loses the value {v!r}" for v in old.get("enum", []) if v not in new.get("enum", [])]
    if old.get("prefixItems") and old["prefixItems"] != cast(list[Any], new.get("prefixItems", []))[: len(old["prefixItems"])]:
        found.append(f"{name} changes its leading items")
    return sorted(found)


def _kind(shape: Json) -> str:
    """A field's type without its default and its description."""
    return json.dumps({k: v for k, v in shape.items() if k not in ("default", "description")}, sort_keys=True)
