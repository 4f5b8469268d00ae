"""Counters of one session server, in Prometheus' text format."""

from __future__ import annotations

from typing import Final

HELP: Final[dict[str, str]] = {
    "turns": "turns committed",
    "repeated_answers": "requests answered with a recorded turn (S5)",
    "rollbacks": "turns that dropped a trailing reply (S4)",
    "branches": "turns that began a branch (S4)",
    "rejected_histories": "histories refused with 409 (S4)",
    "format_errors": "replies that tried to call a tool and did not parse",
    "truncated": "turns cut off by length (S7)",
    "ended_refusals": "requests refused because the session had ended (S7)",
    "engine_retries": "model calls sent again",
    "engine_faults": "model calls that failed for good",
    "rebuilt": "sessions rebuilt from the journal",
    "prompt_tokens": "tokens of all prompts, kept parts included",
    "output_tokens": "tokens sampled",
    "cached_tokens": "prompt tokens that engines found in their cache",
    "best_cached_tokens": "prompt tokens that a perfect cache would have held",
    "routing_overlap_rows": "expert rows that came back although held (S9)",
    "routing_overlap_mismatch": "of those, rows with other experts (S9)",
    "routing_missing": "turns that came back without expert rows (CASES 25)",
}


class Metrics:
    """Counts since the process started."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(HELP, 0)

    def add(self, name: str, n: int = 1) -> None:
        self._counts[name] += n

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def text(self, *, open_sessions: int) -> str:
        lines = ["# TYPE rl360_session_open gauge", f"rl360_session_open {open_sessions}"]
        for name, n in self._counts.items():
            full = f"rl360_session_{name}_total"
            lines += [f"# HELP {full} {HELP[name]}", f"# TYPE {full} counter", f"{full} {n}"]
        return "\n".join(lines) + "\n"
