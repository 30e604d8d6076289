# SPDX-License-Identifier: Apache-2.0
"""`python -m validate make-checkpoint`: write a synthetic EXL3 checkpoint.

The weights are random, so the model talks nonsense; every byte of layout is as converters write it. Use it to rehearse a
deployment, or to test a loader, without downloading anything.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

from .synthesis import dense
from .synthesis.files import Folder
from .synthesis.linears import SIGNS, Weights
from .synthesis.quantization import write_configs
from .synthesis.recipe import Linears, Recipe
from .synthesis.tokenizer import write_tokenizer
from .trellis import codebook

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


def byte_size(text: str) -> int:
    """'5M', '2GB' or '800000' as bytes."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", text.upper())
    if not match or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}, want a size such as 800000, 5MB or 2GB")
    return int(match[1]) * UNITS[match[2]]


def rates(text: str) -> tuple[float, ...]:
    """'3' or '2.5,3,4' as rates."""
    try:
        found = tuple(float(part) for part in text.split(","))
        for rate in found:
            codebook.tile_words(rate)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def codebooks(text: str) -> tuple[str, ...]:
    """'mcg' or '3inst,mul1' as names of codebooks."""
    try:
        return tuple(codebook.codebook(part).name for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_common(form: argparse.ArgumentParser) -> None:
    """Options that every form has."""
    form.add_argument("out", type=Path, help="folder to write; new or empty")
    form.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
    form.add_argument("--shard-size", type=byte_size, help="largest file, as in 5MB; default: one file")
    form.add_argument("--file-per-layer", action="store_true", help="end a file with each layer")
    form.add_argument("--rates", "--rate", type=rates, default=(3.0,), metavar="K[,K...]",
                      help="bits a weight; several are dealt out in turn")
    form.add_argument("--codebooks", "--codebook", type=codebooks, default=("mcg",), metavar="NAME[,NAME...]",
                      help=f"of {', '.join(codebook.CODEBOOKS)}; several are dealt out in turn")
    form.add_argument("--head-rate", type=lambda text: rates(text)[0], help="bits a weight of lm_head (default: dealt)")
    form.add_argument("--signs", choices=SIGNS, default="float", help="packed: the legacy tensors su and sv")
    form.add_argument("--plain", action="append", default=[], metavar="GLOB",
                      help="modules to leave unquantized, such as lm_head or '*.k_proj'; may be given again")
    form.add_argument("--tie", action="store_true", help="config.json says tied, though a head is stored")


def add_dense(form: argparse.ArgumentParser) -> None:
    """Options of the dense form."""
    shape = dense.Shape()
    form.add_argument("--arch", choices=dense.FAMILIES, default="llama")
    for name in ("hidden", "layers", "heads", "kv-heads", "head-dim", "intermediate", "vocabulary", "context"):
        extra = ("--vocab",) if name == "vocabulary" else ()
        default = getattr(shape, name.replace("-", "_"))
        form.add_argument(f"--{name}", *extra, type=int, default=default, help="size")
    form.add_argument("--slices", type=int, default=1, help="cut each MLP into this many .slice.{i}")
    form.add_argument("--bias", action="store_true", help="biases where the architecture lets config.json ask for them")


def recipe_of(options: argparse.Namespace, bias: bool = False) -> Recipe:
    """The recipe that the common options ask for."""
    return Recipe(rates=options.rates, codebooks=options.codebooks, head_rate=options.head_rate, signs=options.signs,
                  plain=tuple(options.plain), bias=bias)


def make_dense(options: argparse.Namespace, folder: Folder) -> None:
    """Fill `folder` with a dense model."""
    shape = dense.Shape(**{name: getattr(options, name) for name in dense.Shape.__dataclass_fields__})
    linears = Linears(Weights(folder, options.seed), recipe_of(options, options.bias))
    write_tokenizer(folder, shape.vocabulary, shape.context)
    dense.build(linears, options.arch, shape)
    write_configs(folder, dense.config(options.arch, shape, tied=options.tie, bias=options.bias))


# form -> (what it makes, adds its options, fills the folder)
FORMS: dict[str, tuple[str, Callable, Callable]] = {
    "dense": ("a dense model", add_dense, make_dense),
}


def main(arguments: list[str]) -> int:
    """Parse, write, and say what was written. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m validate make-checkpoint", description=__doc__)
    forms = parser.add_subparsers(dest="form", required=True)
    for name, (purpose, add_options, _) in FORMS.items():
        form = forms.add_parser(name, help=purpose, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        add_common(form)
        add_options(form)
    options = parser.parse_args(arguments)
    try:
        folder = Folder(options.out, options.shard_size, options.file_per_layer)
        FORMS[options.form][2](options, folder)
    except (ValueError, FileExistsError) as error:
        print(f"make-checkpoint: {error}", file=sys.stderr)
        return 2
    size = folder.finish()
    print(f"{options.out}: {len(folder.headers)} tensors, {size / 1e6:.1f} MB, random weights")
    return 0
