"""Faults to plant in csrc/exl3, and the test that must notice each. A row edits one file once."""

from __future__ import annotations

from dataclasses import dataclass

from tests.csrc.mutants_moe import MOE_MUTANTS

DEPENDENT = "test_dependent_launches_wait_for_what_they_read"
ROTATED = "test_reconstruct_is_exact"
ORIGINAL = "test_reconstruct_original"
WARPGROUPS = "test_warpgroups_give_the_same_bytes"
MANY = "test_many_rows"
MANY_MERGED = "test_many_rows_of_merged_projections"
MERGED = "test_merged_projections"
ROW_TILES = "test_more_rows_than_a_tile"
EDGES = "test_types_and_ragged_edges"
HADAMARD = "test_hadamard"
CUT = "test_every_cut_of_the_work"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """`old`, which occurs once in `file`, becomes `new`; `test` fails."""

    file: str
    old: str
    new: str
    test: str = "test_a_row_is_right_and_the_same_in_every_batch"
    suite: str = "test_kernels.py"


MUTANTS: dict[str, Mutant] = {
    # Barriers and waits.
    "stage-read-before-all-copied": Mutant(
        file="linear.cuh",
        old="    __syncthreads();\n    // The run ahead",
        new="    // The run ahead",
    ),
    "one-copy-group-too-few": Mutant(
        file="linear.cuh", old="cp_async_wait<S::kSlots - 2>", new="cp_async_wait<S::kSlots - 1>"
    ),
    "copies-not-committed": Mutant(
        file="linear.cuh", old="    cp_async_commit();\n    SharedAddress from", new="    SharedAddress from"
    ),
    "product-before-its-input": Mutant(file="linear.cuh", old="  wait_for_previous_grid();\n", new="", test=DEPENDENT),
    "rotation-before-its-input": Mutant(
        file="rotate.cuh", old="  wait_for_previous_grid();\n  const T* x", new="  const T* x", test=DEPENDENT
    ),
    "sum-before-its-parts": Mutant(file="finish.cuh", old="  wait_for_previous_grid();\n", new="", test=DEPENDENT),
    "tile-read-before-written": Mutant(file="finish.cuh", old="  __syncthreads();\n", new=""),
    "rows-stored-before-decoded": Mutant(
        file="reconstruct.cuh", old="  __syncthreads();\n  store_rows", new="  store_rows", test=ROTATED
    ),
    "block-read-before-transformed": Mutant(
        file="reconstruct.cuh", old="    __syncthreads();\n    if (aligned", new="    if (aligned", test=ORIGINAL
    ),
    "warpgroup-reads-unpublished-copies": Mutant(
        file="linear.cuh", old="    if constexpr (kWarpgroup<S>) publish_shared();\n", new="", test=WARPGROUPS
    ),
    "warpgroup-without-fence": Mutant(file="linear.cuh", old="      warpgroup_arrive();\n", new="", test=WARPGROUPS),
    "warpgroup-sums-in-flight": Mutant(
        file="linear.cuh", old="warpgroup_wait<0>", new="warpgroup_wait<1>", test=WARPGROUPS
    ),
    "slot-loaded-beyond-its-column-block": Mutant(
        file="linear.cuh",
        old="min(min(S::kTogether, left_in_block), remaining)",
        new="min(S::kTogether, remaining)",
        test=CUT,
    ),
    # Warps that decode beside warps that multiply.
    "weights-multiplied-before-published": Mutant(file="wide.cuh", old="      publish_shared();\n", new="", test=MANY),
    "weights-stored-over-those-in-use": Mutant(
        file="wide.cuh", old="      barrier_wait(shared.empty(turn.stage), turn.parity ^ 1);\n", new="", test=MANY
    ),
    "weights-multiplied-before-stored": Mutant(
        file="wide.cuh", old="      barrier_wait(shared.weights_full(turn.stage), turn.parity);\n", new="", test=MANY
    ),
    "stage-released-while-it-is-read": Mutant(
        file="wide.cuh", old="if (before >= 0) release(before);", new="release(turn.stage);", test=MANY
    ),
    "packed-weights-decoded-before-they-came": Mutant(
        file="wide.cuh", old="      cp_async_wait<Wide::kPackedStages - 1>();\n", new="", test=MANY
    ),
    "rotated-input-over-that-in-use": Mutant(
        file="wide.cuh",
        old="    barrier_wait(shared.empty(turn.stage), turn.parity ^ 1);\n    barrier_expect",
        new="    barrier_expect",
        test=MANY,
    ),
    "matrix-stored-elsewhere": Mutant(
        file="wide.cuh", old="lane / 16 * (kBlockColumns * 16)", new="lane / 16 * 256", test=MANY
    ),
    "warpgroups-multiply-the-same-columns": Mutant(
        file="wide.cuh",
        old="warp / 4 * (kBlockColumns / 2 * 16)",
        new="warp / 8 * (kBlockColumns / 2 * 16)",
        test=MANY,
    ),
    "parts-of-a-worker-in-one-place": Mutant(
        file="wide.cuh", old="2 * worker + (first == 0)", new="2 * worker", test=MANY
    ),
    "border-at-a-tile-begin-missed": Mutant(
        file="wide.cuh", old="work.cut.start(first) > begin", new="work.cut.start(first) >= begin", test=MANY
    ),
    "rows-read-before-they-are-put": Mutant(
        file="wide_store.cuh",
        old="    group_barrier<32 * kConsumerWarps>(1);\n    float u",
        new="    float u",
        test=MANY,
    ),
    "rows-put-over-those-being-read": Mutant(
        file="wide_store.cuh",
        old="    group_barrier<32 * kConsumerWarps>(1);\n#pragma unroll\n    for (int span",
        new="#pragma unroll\n    for (int span",
        test=MANY,
    ),
    "four-columns-at-once-too-often": Mutant(
        file="finish.cuh", old="aligned && n >= first && n + 4 <= end", new="aligned && n >= first", test=MANY_MERGED
    ),
    "rotated-rows-of-the-first-shard": Mutant(
        file="rotate.cuh",
        old="signs = *reinterpret_cast<const uint2*>(static_cast<const __half*>(args.shard[blockIdx.z].suh)",
        new="signs = *reinterpret_cast<const uint2*>(static_cast<const __half*>(args.shard[0].suh)",
        test=MANY_MERGED,
    ),
    # Stages, tiles and rows in the wrong place.
    "ring-fills-what-is-next": Mutant(
        file="linear.cuh", old="ring.fill = ring.read;", new="ring.fill = ring.after(ring.read);"
    ),
    "next-block-begins-late": Mutant(file="linear.cuh", old="seek(0)", new="seek(1)"),
    "copies-at-the-wrong-rate": Mutant(
        file="linear.cuh", old="if (loader.rate2 == kRate2)", new="if (true)", test=MERGED
    ),
    "parts-overwrite-each-other": Mutant(
        file="linear.cuh",
        old="static_cast<int64_t>(blockIdx.x + block)",
        new="static_cast<int64_t>(blockIdx.x)",
        test=CUT,
    ),
    "row-tiles-share-their-input": Mutant(
        file="linear.cuh", old="args.scratch + blockIdx.y * scratch.row_tile_bytes", new="args.scratch", test=ROW_TILES
    ),
    "shards-share-their-input": Mutant(
        file="linear.cuh", old="x = rotated + index * rotation_bytes +", new="x = rotated +", test=MERGED
    ),
    "halves-of-a-step-swapped": Mutant(file="linear.cuh", old="weights + half * ", new="weights + (1 - half) * "),
    "matrices-one-group-off": Mutant(
        file="linear.cuh", old="x + lane / 8 * kEightDeep", new="x + lane / 16 * kEightDeep"
    ),
    "warpgroup-second-half-one-off": Mutant(
        file="linear.cuh", old="(4 * step + 2)", new="(4 * step + 1)", test=WARPGROUPS
    ),
    "owner-off-by-the-longer-runs": Mutant(
        file="mma.cuh", old="longer + (unit - first) / shorter", new="(unit - first) / shorter", test=CUT
    ),
    "cut-forgets-the-longer-runs": Mutant(file="mma.cuh", old="(b < longer ? b : longer)", new="longer", test=CUT),
    "scratch-two-parts-short": Mutant(
        file="mma.cuh", old="(splits + total_blocks)", new="(splits + total_blocks - 2)", test=CUT
    ),
    "rotated-rows-folded": Mutant(file="mma.cuh", old="+ row % rows)", new="+ row % 8)"),
    "part-dropped": Mutant(file="finish.cuh", old="b = first + 1", new="b = first + 2", test=CUT),
    "accumulator-halves-swapped": Mutant(
        file="finish.cuh",
        old="tile[low + 1][at] = sum.y, tile[low][at + 8] = sum.z",
        new="tile[low + 1][at] = sum.z, tile[low][at + 8] = sum.y",
    ),
    "one-column-too-many": Mutant(file="finish.cuh", old="n + i < end", new="n + i <= end", test=EDGES),
    "shard-border-off-by-one": Mutant(
        file="finish.cuh", old="while (block >= args.shard[index]", new="while (block > args.shard[index]", test=MERGED
    ),
    "rows-beyond-the-last-stored": Mutant(file="finish.cuh", old="if (row >= args.m) return;", new=""),
    "shared-memory-for-a-lower-rate": Mutant(
        file="launch.cuh", old="shared = S::shared_bytes(rate2)", new="shared = S::shared_bytes(2)"
    ),
    "ragged-row-tile-dropped": Mutant(
        file="launch.cuh", old="(args.m + S::kRows - 1) / S::kRows;", new="max(args.m / S::kRows, 1);", test=ROW_TILES
    ),
    # Transforms and signs.
    "transform-one-bit-short": Mutant(file="hadamard.cuh", old="bit < 32", new="bit < 16"),
    "transform-wrong-lane": Mutant(
        file="hadamard.cuh", old="shuffle_xor(v[i], bit)", new="shuffle_xor(v[i], bit ^ (bit == 8 ? 1 : 0))"
    ),
    "transform-signs-swapped": Mutant(file="hadamard.cuh", old="? -1.0f : 1.0f", new="? 1.0f : -1.0f"),
    "signs-of-the-first-shard": Mutant(
        file="rotate.cuh",
        old="suh = static_cast<const __half*>(args.shard[blockIdx.z].suh)",
        new="suh = static_cast<const __half*>(args.shard[0].suh)",
        test=MERGED,
    ),
    "input-one-channel-too-wide": Mutant(
        file="rotate.cuh", old="first + i < args.k_true", new="first + i <= args.k_true", test=EDGES
    ),
    "original-scales-of-the-first-block": Mutant(
        file="reconstruct.cuh",
        old="svh + first_block * kBlockColumns + n0",
        new="svh + n0",
        test=ORIGINAL,
    ),
    "original-fragment-swapped": Mutant(
        file="reconstruct.cuh",
        old="{hadamard_pair<kOriginalDivide>(column, 2 * c)",
        new="{hadamard_pair<kOriginalDivide>(column + 1, 2 * c)",
        test=ORIGINAL,
    ),
    "original-one-row-too-many": Mutant(
        file="reconstruct.cuh", old="k0 + 2 * pair + r < k_true", new="k0 + 2 * pair + r <= k_true", test=ORIGINAL
    ),
    "original-rows-not-cut": Mutant(
        file="reconstruct.cuh", old="k0 + kOriginalRows <= k_true && ", new="", test=ORIGINAL
    ),
    "original-halves-change-places-late": Mutant(
        file="reconstruct.cuh", old="^ (warp & 4) * 4", new="^ (warp & 2) * 8", test=ORIGINAL
    ),
    "original-scales-of-the-other-row": Mutant(
        file="reconstruct.cuh", old="0, 0, mul_by_half<true>", new="0, 0, mul_by_half<false>", test=ORIGINAL
    ),
    "original-words-swapped-before-they-are-added": Mutant(
        file="trellis.cuh",
        old="{expand<kBook>(s[4 * i]), expand<kBook>(s[4 * i + 2])",
        new="{expand<kBook>(s[4 * i + 2]), expand<kBook>(s[4 * i])",
        test=ORIGINAL,
    ),
    "original-block-overwritten-too-early": Mutant(
        file="reconstruct.cuh", old="    __syncthreads();  // all have read", new="    // all have read", test=ORIGINAL
    ),
    "original-tiles-decoded-before-they-came": Mutant(
        file="reconstruct.cuh", old="    cp_async_wait<0>();\n    __syncwarp();\n", new="", test=ORIGINAL
    ),
    "original-next-tile-one-on": Mutant(
        file="reconstruct.cuh", old="at -= blocks, ++group", new="at -= blocks, group += 2", test=ORIGINAL
    ),
    "original-columns-not-cut": Mutant(
        file="reconstruct.cuh", old=" && n0 + kBlockColumns <= columns", new="", test=ORIGINAL
    ),
    "rotated-rows-not-cut": Mutant(
        file="reconstruct.cuh", old="if (row >= rows) return;", new="if (row > rows) return;", test=ROTATED
    ),
    "hadamard-beyond-the-last-group": Mutant(
        file="reconstruct.cuh", old="if (first >= n) return;", new="if (first >= n + 128) return;", test=HADAMARD
    ),
    # Decoding.
    "tile-is-no-ring": Mutant(
        file="trellis.cuh", old="(start / 32 + 1) % R::kTileWords * 4", new="(start / 32 + 1) * 4"
    ),
    "registers-swapped": Mutant(
        file="trellis.cuh", old="a[1] = decode_pair<kBook>(s[4], s[5])", new="a[1] = decode_pair<kBook>(s[2], s[3])"
    ),
    "window-one-byte-off": Mutant(file="trellis.cuh", old="0x4421", new="0x4432"),
    "half-rates-step-early": Mutant(file="trellis.cuh", old="((j + 1) / 2)", new="((j + 2) / 2)"),
    "codebook-multiplier-one-bit-off": Mutant(file="trellis.cuh", old="0xCBAC1FEDu", new="0xCBAC1FEFu"),
    "codebook-increment-one-off": Mutant(file="trellis.cuh", old="64248484u", new="64248485u"),
    "codebook-shift-one-bit-off": Mutant(file="trellis.cuh", old="0xc931c931u", new="0xc930c931u"),
    "states-swapped-in-a-pair": Mutant(file="trellis.cuh", old="0x5410", new="0x1054", test=ROTATED),
    "sums-in-the-wrong-column": Mutant(
        file="trellis.cuh", old="lane % 4 * 2 + 1 ? ~0u : 0", new="lane % 4 * 2 ? ~0u : 0"
    ),
    "words-swapped-before-they-are-added": Mutant(
        file="trellis.cuh",
        old="right[4] = {expand<kBook>(s[2]), expand<kBook>(s[6])",
        new="right[4] = {expand<kBook>(s[6]), expand<kBook>(s[2])",
    ),
    "byte-sums-shifted": Mutant(
        file="trellis.cuh",
        old="low = fma_half2(twice[1] * 65536u + twice[0], 0x7aee7aeeu, 0xc2e8c2e8u)",
        new="low = fma_half2(twice[1] * 65536u + twice[0], 0x7aee7aeeu, 0xc2e9c2e9u)",
    ),
    # From operators to launches.
    "trellis-of-the-first-shard": Mutant(
        file="bindings.cpp", old="trellis_bytes + 2 * words", new="trellis_bytes", test=MERGED
    ),
    "suh-of-the-first-shard": Mutant(file="bindings.cpp", old="suh_halves + k * i", new="suh_halves", test=MERGED),
    "blocks-counted-by-width": Mutant(file="bindings.cpp", old="columns += n;", new="columns += width;", test=MERGED),
}

MUTANTS |= {
    name: Mutant(file=file, old=old, new=new, test=test, suite="test_moe.py")
    for name, (file, old, new, test) in MOE_MUTANTS.items()
}


def plant(name: str, texts: dict[str, str]) -> dict[str, str]:
    """The sources with one fault. ValueError if the table no longer fits them."""
    mutant = MUTANTS[name]
    count = texts.get(mutant.file, "").count(mutant.old)
    if count != 1:
        raise ValueError(f"mutant {name}: {mutant.old!r} occurs {count} times in csrc/exl3/{mutant.file}, want once")
    return texts | {mutant.file: texts[mutant.file].replace(mutant.old, mutant.new)}
