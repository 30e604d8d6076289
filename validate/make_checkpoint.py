# SPDX-License-Identifier: Apache-2.0
"""`python -m validate make-checkpoint`: write a synthetic EXL3 checkpoint.

The weights are random, so the model talks nonsense, but every byte of layout is as converters write it. Use it to
rehearse a deployment, or to test a loader, without downloading anything.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .synthesis import dense, moe, moe_configs, rank_sliced
from .synthesis.files import Folder
from .synthesis.linears import SIGNS, Weights
from .synthesis.quantization import write_configs
from .synthesis.recipe import Linears, Recipe
from .synthesis.tokenizer import write_tokenizer
from .trellis import codebook

TIERS = "experts of each rate in every layer of a mixed checkpoint (default: drawn); an MTP layer has the first rate"
ALIASES = {"vocabulary": ("--vocab",), "drafts": ("--mtp",)}
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


def whole_numbers(text: str) -> tuple[int, ...]:
    """'160,96' as numbers."""
    return tuple(int(part) for part in text.split(","))


def layer_tiers(text: str) -> tuple[int, tuple[int, ...]]:
    """'3=206,50' as layer and counts."""
    layer, _, counts = text.partition("=")
    return int(layer), whole_numbers(counts)


def add_common(form: argparse.ArgumentParser) -> None:
    """Options that every form has."""
    form.add_argument("out", type=Path, help="folder to write; new or empty")
    form.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
    form.add_argument("--shard-size", type=byte_size, help="largest file, as in 5MB; default: one file")
    form.add_argument("--file-per-layer", action="store_true", help="end a file with each layer")
    form.add_argument(
        "--rates",
        "--rate",
        type=rates,
        default=(3.0,),
        metavar="K[,K...]",
        help="bits a weight; several are dealt out in turn",
    )
    form.add_argument(
        "--codebooks",
        "--codebook",
        type=codebooks,
        default=("mcg",),
        metavar="NAME[,NAME...]",
        help=f"of {', '.join(codebook.CODEBOOKS)}; several are dealt out in turn",
    )
    form.add_argument("--head-rate", type=lambda text: rates(text)[0], help="bits a weight of lm_head (default: dealt)")
    form.add_argument("--signs", choices=SIGNS, default="float", help="packed: the legacy tensors su and sv")
    form.add_argument(
        "--plain",
        action="append",
        default=[],
        metavar="GLOB",
        help="modules to leave unquantized, such as lm_head or '*.k_proj'; may be given again",
    )
    form.add_argument("--tie", action="store_true", help="config.json says tied, though a head is stored")


def add_shape(form: argparse.ArgumentParser, shape: type, helps: dict[str, str]) -> None:
    """One integer option per field of the dataclass `shape`."""
    for field in dataclasses.fields(shape):
        names = [f"--{field.name.replace('_', '-')}", *ALIASES.get(field.name, ())]
        form.add_argument(*names, type=int, default=field.default, help=helps.get(field.name, "size"))


def shape_of(options: argparse.Namespace, shape: type) -> Any:
    """The dataclass `shape` filled from the options; ValueError for a size below 1 (0 where that means none)."""
    sizes = {field.name: getattr(options, field.name) for field in dataclasses.fields(shape)}
    for name, size in sizes.items():
        least = 0 if name in ("first_dense", "drafts") else 1
        if size < least:
            raise ValueError(f"--{name.replace('_', '-')} {size}, want at least {least}")
    return shape(**sizes)


def add_dense(form: argparse.ArgumentParser) -> None:
    """Options of the dense form."""
    form.add_argument("--arch", choices=dense.FAMILIES, default="llama")
    add_shape(form, dense.Shape, {"slices": "cut each MLP into this many .slice.{i}"})
    form.add_argument("--bias", action="store_true", help="biases where the architecture lets config.json ask for them")


def add_moe(form: argparse.ArgumentParser) -> None:
    """Options of the mixture-of-experts form."""
    form.add_argument("--family", choices=moe_configs.FAMILIES, default="glm4_moe")
    form.add_argument(
        "--layout",
        choices=("ordinary", *rank_sliced.LAYOUTS),
        default="ordinary",
        help="ordinary: experts are modules like others; else rank-sliced, all but experts unquantized, "
        "and --rates are those of the experts",
    )
    form.add_argument("--tp", type=int, default=2, help="ranks stored, where rank-sliced")
    form.add_argument("--tiers", type=whole_numbers, default=(), metavar="N,N[,...]", help=TIERS)
    form.add_argument(
        "--layer-tiers", type=layer_tiers, action="append", default=[], metavar="L=N,N[,...]", help="of one layer"
    )
    form.add_argument("--name-rotation", action="store_true", help="write rotation_layout where it may be absent")
    form.add_argument(
        "--no-shim",
        action="store_true",
        help="leave out the quantization_config that claims another method, where rank-sliced",
    )
    form.add_argument(
        "--agreeing",
        action="store_true",
        help="MTP layers whose drafts the target mostly accepts (default: hardly ever)",
    )
    add_shape(
        form,
        moe_configs.Shape,
        {
            "drafts": "MTP layers",
            "first_dense": "leading layers without experts",
            "moe_intermediate": "of one expert, all ranks together",
        },
    )


def recipe_of(options: argparse.Namespace, **others: Any) -> Recipe:
    """The recipe that the common options ask for; `others` are its remaining fields."""
    fields = {
        "rates": options.rates,
        "codebooks": options.codebooks,
        "head_rate": options.head_rate,
        "signs": options.signs,
        "plain": tuple(options.plain),
    }
    return Recipe(**(fields | others))


def make_dense(options: argparse.Namespace, folder: Folder) -> None:
    """Fill `folder` with a dense model."""
    shape = shape_of(options, dense.Shape)
    dense.slice_widths(shape.intermediate, shape.slices)  # refuses before anything is written
    linears = Linears(Weights(folder, options.seed), recipe_of(options, bias=options.bias))
    write_tokenizer(folder, shape.vocabulary, shape.context)
    dense.build(linears, options.arch, shape)
    write_configs(folder, dense.config(options.arch, shape, tied=options.tie, bias=options.bias))


def make_moe(options: argparse.Namespace, folder: Folder) -> None:
    """Fill `folder` with a mixture-of-experts model."""
    shape = shape_of(options, moe_configs.Shape)
    config = moe_configs.config(options.family, shape, tied=options.tie)
    slicing = None
    others: dict[str, Any] = {"residual": 0.05 if options.agreeing else 1.0}
    if options.layout != "ordinary":
        for name, default in (("codebooks", ("mcg",)), ("head_rate", None), ("signs", "float"), ("plain", [])):
            if getattr(options, name) != default:
                raise ValueError(
                    f"--{name.replace('_', '-')} with --layout {options.layout}: the layout has none to choose"
                )
        slicing = rank_sliced.Slicing(
            layout=options.layout,
            named=options.name_rotation,
            ranks=options.tp,
            rates=options.rates,
            tiers=options.tiers,
            layer_tiers=dict(options.layer_tiers),
        )
        slicing.check_width(shape.moe_intermediate)
        for layer in range(shape.first_dense, shape.layers):
            slicing.counts(layer, shape.experts)  # refuses before anything is written
        others |= {"plain": ("*",), "rates": (3.0,)}
        if not options.no_shim:
            config["quantization_config"] = rank_sliced.shim()
        config["hybrid_tr3_tail"] = rank_sliced.metadata(slicing, shape.moe_layers, shape.experts)
    builder = moe.Builder(
        Linears(Weights(folder, options.seed), recipe_of(options, **others)),
        options.family,
        shape,
        slicing,
        options.agreeing,
    )
    write_tokenizer(folder, shape.vocabulary, shape.context)
    builder.build()
    write_configs(folder, config, exl3=slicing is None)
    if slicing and slicing.mixed:
        table = rank_sliced.bitmap(slicing, options.seed, shape.moe_layers, shape.experts, shape.layers)
        folder.add_json(rank_sliced.BITMAP, table)


# form -> (what it makes, adds its options, fills the folder)
FORMS: dict[str, tuple[str, Callable, Callable]] = {
    "dense": ("a dense model", add_dense, make_dense),
    "moe": ("a mixture of experts, ordinary or rank-sliced, with MTP layers or without", add_moe, make_moe),
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
