"""The only seam between the laptop and the cluster: CUDA with NCCL, or the CPU with gloo.

megatron-core asks for CUDA by name in some forty places. On a machine without CUDA, `with platform():` sends those requests to the
CPU for the calling thread and puts torch back afterwards; nothing of megatron is rewritten. On a GPU it changes nothing.

Import this module before anything of megatron: it makes megatron importable (and, without CUDA, quick to import).
Not covered: mixing both in one process.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast
from unittest import mock

from rl360.extras import MissingExtra

try:
    import torch
    from torch.overrides import TorchFunctionMode
except ImportError as e:
    raise MissingExtra("the trainer", e.name or "torch", "trainer") from e


@dataclass(frozen=True)
class Platform:
    """Where this process trains: the device of its tensors and the backend of its collectives."""

    device: torch.device
    backend: Literal["nccl", "gloo"]


_CPU = Platform(torch.device("cpu"), "gloo")


def _eager(model: Callable[..., Any] | None = None, **_: object) -> Callable[..., Any]:
    """What `torch.compile` does on the CPU here: nothing. Compiling megatron's helpers costs more than a whole tiny run."""
    return model if model is not None else _same


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """`function`, fused into few kernels on a GPU; as it is on a CPU, where compiling it costs more than a whole tiny run."""
    if not torch.cuda.is_available():
        return function
    import torch._dynamo.config as dynamo

    dynamo.recompile_limit = 64  # one function serves several ranks of tensors, with and without gradient
    return cast(F, torch.compile(function, dynamic=True))  # pyright: ignore[reportUnknownMemberType]


def _import_megatron() -> None:
    """Import megatron-core. Without CUDA `torch.compile` stands aside meanwhile, which also leaves inductor out (6 s of import)."""
    # Megatron warns about every fused library that is absent; `model.py` names what is used in their place.
    quick = contextlib.nullcontext() if torch.cuda.is_available() else mock.patch.object(torch, "compile", _eager)
    try:
        with quick, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import dist_checkpointing  # noqa: F401 # pyright: ignore[reportUnusedImport]
            from megatron.core.models.gpt import (
                GPTModel,  # noqa: F401 # pyright: ignore[reportUnusedImport]
                gpt_layer_specs,  # noqa: F401 # pyright: ignore[reportUnusedImport]
            )
            from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401 # pyright: ignore
            from megatron.core.transformer.moe import moe_utils
    except ImportError as e:
        raise MissingExtra("the trainer", e.name or "megatron-core", "trainer") from e
    if not hasattr(moe_utils, "te_general_gemm"):
        cast(Any, moe_utils).te_general_gemm = None  # 0.16.1 reads this name without defining it when Transformer Engine is absent


logging.getLogger("megatron").setLevel(logging.WARNING)  # at INFO it lists every parameter
_import_megatron()


class _Ordered:
    """Stands in for CUDA streams and events. They order work; on the CPU work is in order already."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record_event(self, event: _Ordered | None = None) -> _Ordered:
        return event or _Ordered()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def __enter__(self) -> _Ordered:
        return self

    def __exit__(self, *_: object) -> None: ...


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _CudaToCpu(TorchFunctionMode):
    """Rewrites a CUDA device in the arguments of torch functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU.device}
        elif func is torch.Tensor.cuda:
            return args[0]
        elif func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU.device, *args[2:])
        elif func is torch.Tensor.type and len(args) == 1 and not kwargs:  # optimizers sort parameters by "torch.cuda.FloatTensor"
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **(kwargs or {}))


def _nothing() -> Callable[..., None]:
    """A new function a call: torch keeps a table of torch.cuda's functions by identity."""
    return lambda *_, **__: None


def _cpu_rng(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _as_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """All-to-all split sizes must be lists; megatron makes lists of CUDA tensors only."""
    return tensor.cpu().numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


@contextlib.contextmanager
def platform(rank: int = 0) -> Generator[Platform]:
    """Run megatron in this block, in this thread. Yields the platform; torch is as before when the block ends.

    Ranks of one machine take its GPUs in turn.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
        yield Platform(torch.device("cuda", torch.cuda.current_device()), "nccl")
        return
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    stream = _Ordered()
    stubs: dict[str, Any] = {
        "current_device": lambda: _CPU.device,
        "current_stream": lambda *_: stream,  # pyright: ignore[reportUnknownLambdaType]
        "default_stream": lambda *_: stream,  # pyright: ignore[reportUnknownLambdaType]
        "stream": lambda _: contextlib.nullcontext(),  # pyright: ignore[reportUnknownLambdaType]
        "Stream": _Ordered,
        "Event": _Ordered,
        "get_rng_state": _cpu_rng,
        **{name: _nothing() for name in ("synchronize", "empty_cache", "set_device", "manual_seed")},
    }
    with (
        mock.patch.multiple(torch.cuda, **stubs),
        mock.patch.object(torch.cuda.random, "get_rng_state", _cpu_rng),
        mock.patch.object(megatron_random, "_lazy_call", _nothing()),  # it would queue a closure per fork of the generator, for ever
        mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _as_host),
        _CudaToCpu(),
    ):
        yield _CPU
