"""The overlay refuses, in words, to be imported over another version of vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from release.pins import read_pins
from vllm import exl3_upstream

# As the overlay over a newer vLLM, which lacks a name that the overlay imports.
_OVER_ANOTHER = """
import sys
import vllm.version
vllm.version.__version__ = "0.33.0"
sys.modules["vllm.model_executor.layers.fused_moe"] = None
import vllm.model_executor.layers.quantization.exl3
"""


def test_the_version_is_the_one_that_the_release_pins():
    assert read_pins(Path(__file__).resolve().parents[2]).upstream_version == exl3_upstream.UPSTREAM


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+exl3.1", "0.32.0+exl3.1.cpu"])
def test_every_build_of_it_is_taken(version):
    exl3_upstream.require_upstream(version)


def test_another_version_is_named_before_a_missing_import_is():
    done = subprocess.run([sys.executable, "-c", _OVER_ANOTHER], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.endswith("ImportError: this EXL3 overlay is for vLLM 0.32.0, found 0.33.0\n")
