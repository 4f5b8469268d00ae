"""The command line and environment of one SGLang server. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rl360.config import Config

UNPUSHED: Final = "0"
"""Version label of a server that holds what it read from the policy's folder: version 0."""

SPARE: Final = 8
"""A server takes a few tokens less than its context length; a conversation must fit whole."""

ENVIRONMENT: Final = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",  # a probe that samples answers 503 while a push pauses the server
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the spare tokens of a conversation as long as the model allows
    "HF_HUB_OFFLINE": "1",  # the policy is a folder
}


def command(config: Config, *, index: int, port: int, seed: int, python: str) -> Sequence[str]:
    """`index`: of the engine in the run; it chooses the GPUs. `python`: where the recipe names no interpreter."""
    engine, server = config.engine, config.engine.sglang
    options = {
        "--model-path": config.policy.folder.absolute(),
        "--served-model-name": "policy",
        "--host": server.host,
        "--port": port,
        "--device": server.device,
        "--dtype": engine.dtype,
        "--tp-size": server.tp,
        "--ep-size": server.ep,
        "--base-gpu-id": server.first_gpu + index * server.tp,
        "--mem-fraction-static": server.mem_fraction,
        "--context-length": config.sampling.context + SPARE,
        "--max-running-requests": engine.slots,
        "--random-seed": seed,
        "--weight-version": UNPUSHED,
    }
    settings = [str(part) for option in options.items() for part in option]
    flags = ["--skip-server-warmup", *(["--enable-return-routed-experts"] if engine.routed_experts else [])]
    return [server.python or python, "-m", "sglang.launch_server", *settings, *flags, *server.args]
