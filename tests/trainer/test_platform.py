"""The seam: megatron runs on the CPU inside the block, torch is as before after it, a missing extra is named."""

from __future__ import annotations

import subprocess
import sys
import threading

import torch

from rl360.extras import MissingExtra
from rl360.trainer.platform import platform


def test_cuda_requests_go_to_the_cpu_inside_the_block_alone():
    before = (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize)
    with platform() as here:
        assert (here.device.type, here.backend) == ("cpu", "gloo")
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.ones(2).cuda().device.type == "cpu"
        assert torch.ones(2).to("cuda").device.type == "cpu"
        assert torch.device(torch.cuda.current_device()).type == "cpu"
    assert (torch.cuda.current_device, torch.cuda.Stream, torch.cuda.synchronize) == before


def test_it_can_be_entered_again_and_is_restored_after_an_error():
    before = torch.cuda.current_device
    try:
        with platform(), platform():
            raise ValueError
    except ValueError:
        assert torch.cuda.current_device is before


def test_other_threads_keep_their_own_torch_functions():
    errors: list[type[BaseException]] = []

    def elsewhere() -> None:
        try:
            torch.zeros(1, device="cuda")
        except (AssertionError, RuntimeError) as e:
            errors.append(type(e))

    with platform():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(10)
    assert errors, "the device of another thread was rewritten"


def test_a_missing_extra_is_named():
    code = "import sys; sys.modules['megatron'] = None; import rl360.trainer.platform"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "rl360[trainer]" in done.stderr
    assert "rl360[trainer]" in str(MissingExtra("the trainer", "megatron-core", "trainer"))


def test_megatron_is_imported_without_compilers():
    code = (
        "import sys, rl360.trainer.policy; "
        "print([m for m in sys.modules if m.startswith(('triton', 'transformer_engine', 'torch._inductor', 'torch._dynamo'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
