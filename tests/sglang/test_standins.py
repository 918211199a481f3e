"""What stands for SGLang's compiled kernels is enough for SGLang to start on a GPU, also with drafts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

# What SGLang imports on a GPU alone, or then with more of what is compiled.
MODULES = (
    "kernels.ops.speculative.spec_tree",
    "kernels.ops.speculative.verify_sampling",
    "srt.layers.attention.deepseek_v4_backend",
    "srt.layers.attention.dsa_backend",
    "srt.layers.attention.flashattention_backend",
    "srt.layers.attention.flashmla_backend",
    "srt.layers.attention.triton_backend",
    "srt.speculative.eagle_draft_cuda_graph_runner",
    "srt.speculative.eagle_draft_extend_cuda_graph_runner",
    "srt.speculative.eagle_worker_v2",
)
# The tests' own `sgl_kernel` is of a CPU.
AS_ON_A_GPU = """
import importlib, sys
from types import SimpleNamespace
import torch
torch.version.cuda, cuda = "13.0", torch.cuda
device = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=140 << 30, name="NVIDIA H200")
cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
cuda.get_device_capability, cuda.get_device_name = lambda *_: (9, 0), lambda *_: device.name
cuda.get_device_properties = lambda *_: device
from kv_canary.difftest.stress.sglang import standins
standins.use()
sys.meta_path.insert(0, sys.meta_path.pop())
for name in sys.argv[1:]:
    importlib.import_module(f"sglang.{name}")
from sglang.srt.utils import is_cuda
print("all there", is_cuda())
"""


@pytest.mark.long
def test_all_that_drafts_want_imported_on_a_gpu_is_there(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", AS_ON_A_GPU, *MODULES], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.stdout.splitlines()[-1:] == ["all there True"], ran.stderr
