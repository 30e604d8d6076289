# SPDX-License-Identifier: Apache-2.0
"""Which part of which stored tensor a rank keeps, and where it stands in the layer's input and output.

    stored modules of a layer + the outputs and inputs that this rank owns  ->  pieces

A layer of a model may merge several stored modules (q, k and v), a stored module may hold several outputs of a layer
(one qkv), and a very wide one is stored in slices along its outputs or inputs.  Tensor parallelism cuts all of them.
Inputs can be cut between Hadamard blocks only; a block of outputs that a cut crosses is kept whole by both ranks.
Plain numbers: no torch, no vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .checkpoint import LinearSpec
from .layout import BLOCK, Span, padded
from .safetensors_headers import CheckpointError

ROW_PARALLEL = re.compile(r"\.(self_attn\.o_proj|mlp\.down_proj)$")


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A rank's part of one axis of a layer: channels [start, start + width) of `full` true ones."""

    full: int
    start: int
    width: int
    slot: int = 0  # columns the layer sets aside for it; more than `width` only for a padded vocabulary


@dataclass(frozen=True, kw_only=True)
class Source:
    """One stored module.  `spec` is None where it is stored unquantized."""

    module: str  # checkpoint name
    spec: LinearSpec | None
    part: int | None = None  # i of `.slice.{i}`

    @property
    def stored(self) -> LinearSpec:
        """The spec of a source that is known to be quantized."""
        assert self.spec is not None, self.module
        return self.spec


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a rank keeps of one source."""

    source: Source
    output: int  # index of the layer's output that it feeds
    rows: Span  # stored inputs kept
    columns: Span  # stored outputs kept; whole blocks if quantized
    first: int  # of the kept columns, those before this one are not this rank's
    width: int  # columns that are
    x_start: int  # first of the layer's local inputs that the kept rows multiply
    x_width: int  # how many of them; the kept rows beyond multiply zeros
    y_start: int  # column of the layer's local output where `width` columns begin


def place(components: Sequence[Sequence[Source]], outputs: Sequence[Owned], inputs: Owned, tp: int) -> list[Piece]:
    """Cut the stored `components` of a layer to the part that a rank owns.

    Args:
        components: stored modules in the order of the outputs they hold; each a single source, or its slices.
        outputs: this rank's part of each of the layer's outputs.
        inputs: this rank's part of the layer's inputs.
        tp: tensor parallel size, for messages.

    Raises:
        CheckpointError: stored sizes do not fit the layer, or a cut falls inside a block of inputs.
    """
    pieces: list[Piece] = []
    index = y_start = 0
    for component in components:
        fed = outputs[index : index + _outputs_held(component, outputs[index:], len(components) == len(outputs))]
        total = sum(owned.full for owned in fed)
        before = 0
        for owned in fed:
            wanted = (before + owned.start, before + owned.start + owned.width)
            pieces += _cut(component, index, wanted, total, inputs, y_start, tp)
            before += owned.full
            y_start += owned.slot or owned.width
            index += 1
    if index != len(outputs):
        names = ", ".join(source.module for component in components for source in component)
        raise CheckpointError([f"{names}: feed {index} outputs, want {len(outputs)}"])
    return pieces


def _outputs_held(component: Sequence[Source], outputs: Sequence[Owned], one_each: bool) -> int:
    """How many of the next outputs a component holds: as many as its stored width is the padding of."""
    if one_each or any(source.spec is None for source in component):
        return 1
    widths = {sum(source.stored.n for source in component), max(source.stored.n for source in component)}
    total = 0
    for count, owned in enumerate(outputs, start=1):
        total += owned.full
        if padded(total) in widths:
            return count
    return 1  # the sizes are refused where they are compared, with names


def _cut(
    component: Sequence[Source], output: int, wanted: Span, total: int, inputs: Owned, y_start: int, tp: int
) -> list[Piece]:
    """The pieces of one component that hold the outputs [wanted) for this rank's inputs."""
    if component[0].spec is None:
        return [_plain(component[0], output, wanted, inputs, y_start)]
    pieces: list[Piece] = []
    problems: list[str] = []
    for source, row0, rows, column0, columns in _extents(component, total, inputs.full):
        spec = source.stored
        if (spec.k, spec.n) != (padded(rows), padded(columns)):
            want = f"{padded(rows)} x {padded(columns)} for {rows} x {columns}"
            problems.append(f"{source.module}.trellis: {spec.k} x {spec.n} inputs x outputs, want {want}")
            continue
        a, b = max(inputs.start - row0, 0), min(inputs.start + inputs.width - row0, rows)
        c, d = max(wanted[0] - column0, 0), min(wanted[1] - column0, spec.n if column0 + columns == total else columns)
        if a >= b or c >= d:
            continue
        if a % BLOCK or (b % BLOCK and b != rows):
            problems.append(_inside_a_block(source, inputs, tp))
            continue
        pieces.append(
            Piece(
                source=source,
                output=output,
                rows=(a, padded(b)),
                columns=(c // BLOCK * BLOCK, padded(d)),
                first=c % BLOCK,
                width=d - c,
                x_start=row0 + a - inputs.start,
                x_width=b - a,
                y_start=y_start + column0 + c - wanted[0],
            )
        )
    if problems:
        raise CheckpointError(problems)
    return pieces


def _plain(source: Source, output: int, wanted: Span, inputs: Owned, y_start: int) -> Piece:
    """The piece of an unquantized source, which is stored whole and may be cut anywhere."""
    return Piece(
        source=source,
        output=output,
        rows=(inputs.start, inputs.start + inputs.width),
        columns=wanted,
        first=0,
        width=wanted[1] - wanted[0],
        x_start=0,
        x_width=inputs.width,
        y_start=y_start,
    )


def _extents(component: Sequence[Source], outputs: int, inputs: int) -> Iterator[tuple[Source, int, int, int, int]]:
    """For each source: (source, first true row, true rows, first true column, true columns).

    A slice is a whole number of blocks except for the last, which holds what is left (so exllamav3 cuts them).
    """
    by_outputs = len(component) > 1 and sum(source.stored.n for source in component) == padded(outputs)
    row = column = 0
    for source in component:
        last = source is component[-1]
        rows = inputs - row if len(component) == 1 or by_outputs or last else source.stored.k
        columns = outputs - column if len(component) == 1 or not by_outputs or last else source.stored.n
        yield source, row, rows, column, columns
        if by_outputs:
            column += columns
        else:
            row += rows


def _inside_a_block(source: Source, inputs: Owned, tp: int) -> str:
    """Message for a cut that would split a Hadamard block, with the sizes that would not."""
    cut = f"its {inputs.full} inputs into {inputs.width}"
    return f"{source.module}.trellis: tensor parallel size {tp} cuts {cut}, {_want(inputs.full, tp)}"


def _want(inputs: int, tp: int) -> str:
    works = [size for size in range(2, tp + 1) if inputs % (size * BLOCK) == 0]
    sizes = ", ".join(map(str, [1, *works]))
    return f"inside a Hadamard block; want multiples of {BLOCK}: tensor parallel size {sizes}"


def split_blocks(linears: Mapping[str, LinearSpec], tp: int) -> list[str]:
    """Modules whose inputs `tp` ranks cannot share, told from their names: those every decoder cuts along its inputs.

    `place` refuses the same and more, but only once a worker builds the layer.
    """
    return [
        f"{module}.trellis: tensor parallel size {tp} cuts its {spec.k} inputs {_want(spec.k, tp)}"
        for module, spec in linears.items()
        if ROW_PARALLEL.search(module) and spec.k % (tp * BLOCK)
    ]
