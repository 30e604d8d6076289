"""Checkpoints for engines on a card: made from a seed, large enough that the kernels of real models run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from validate.__main__ import main as validate

SMALL = (
    "dense --hidden 512 --heads 8 --kv-heads 2 --head-dim 64 --intermediate 1024 --rates 2,3,4 --vocab 1024"
    " --context 4096"
)
# Eight layers with the shapes of an 8B model; tests/data/wide_dense.json is what a CPU engine says of it.
WIDE = (
    "dense --hidden 4096 --heads 32 --kv-heads 8 --head-dim 128 --intermediate 14336 --layers 8 --vocab 8192"
    " --rates 3,4 --seed 5 --context 4096"
)
# GLM-5.2 in small: its attention's and indexer's head sizes, which the sparse kernels need, few layers and experts.
_GLM = (
    "moe --family glm_moe_dsa --heads 64 --nope-dim 192 --v-dim 256 --q-lora 512 --index-heads 32 --layers 4"
    " --moe-intermediate 512 --intermediate 1024 --vocab 1024 --context 8192 --layout per_expert"
)
GLM = f"{_GLM} --hidden 2048 --experts 64 --experts-per-token 8 --drafts 1 --agreeing --seed 3"
GLM_TINY = f"{_GLM} --hidden 1024 --experts 16 --experts-per-token 4 --tp 1 --seed 7"

RECIPES = {
    "small": SMALL,
    "wide": WIDE,
    "uniform": f"{GLM} --tp 1 --rates 3",
    "mixed": f"{GLM} --tp 1 --rates 3,4",
    # Half the heads: with an fp8 cache a rank shares the context of fewer than 32 heads only.
    "mixed for two ranks": f"{GLM} --heads 32 --tp 2 --moe-intermediate 1024 --rates 3,4",
    "tiny": f"{GLM_TINY} --rates 3,4",
}


def make(names: list[str], under: Path) -> dict[str, Path]:
    """The named checkpoints, each in a new folder under `under`; several are made at once."""

    def write(name: str) -> Path:
        folder = under / name.replace(" ", "-")
        form, *options = RECIPES[name].split()
        assert validate(["make-checkpoint", form, str(folder), *options]) == 0
        return folder

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(write, names), strict=True))
