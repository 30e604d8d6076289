"""Real vLLM engines for tests: in this process, where one starts in seconds, or as `vllm serve` (see server.py)."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Read when vLLM is imported, so before any test module is.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SHARED_DATA = ROOT.parent / "shared" / "data"
SMOLLM2 = SHARED_DATA / "smollm2-135m-instruct-exl3-3.0bpw"

Engine = Any  # vllm.LLM
# Of latent attention, whatever the processor: upstream prefers AMX's, which takes bfloat16 and 576 channels only, and
# asks for neither.
LATENT_ATTENTION = "CPU_MLA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """A factory: engine(folder, **options) -> vllm.LLM, float32 and eager unless told otherwise.  All are shut down."""
    from vllm import LLM

    started: list[Engine] = []

    def start(model: Path | str, **options: Any) -> Engine:
        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "seed": 0}
        defaults["attention_backend"] = LATENT_ATTENTION
        if options.get("tensor_parallel_size", 1) == 1:
            defaults["distributed_executor_backend"] = "uni"
        if speculation := options.get("speculative_config"):
            options["speculative_config"] = {"attention_backend": LATENT_ATTENTION} | speculation
        try:
            started.append(LLM(str(model), **(defaults | options)))
        except BaseException:
            forget_groups()
            raise
        return started[-1]

    yield start
    while started:
        close(started.pop())


def close(llm: Engine) -> None:
    """Shut an engine down and let its memory go."""
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()


def forget_groups() -> None:
    """Drop the process groups that an engine which failed to start has left: the next may need others."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real checkpoint, written by exllamav3."""
    if not SMOLLM2.is_dir():
        pytest.skip("shared/data is not here")
    return SMOLLM2


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """caplog that hears vLLM, whose logger does not pass its records on and drops handlers when it is configured."""
    import logging

    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    configure_logging(LoggingConfig())  # as the first engine of a process would
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Tensors that vLLM's loader has read from files in this process, and the bytes of each; clear it between loads."""
    from vllm.model_executor.model_loader import weight_utils

    sizes: dict[str, int] = {}
    opened = weight_utils.safe_open

    class Noting:
        def __init__(self, *args: Any, **named: Any) -> None:
            self.file = opened(*args, **named)

        def __enter__(self) -> Noting:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> object:
            return self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor = self.file.get_tensor(name)
            sizes[name] = sizes.get(name, 0) + tensor.nbytes
            return tensor

    monkeypatch.setattr(weight_utils, "safe_open", Noting)
    return sizes
