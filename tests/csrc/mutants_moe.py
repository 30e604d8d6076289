"""Faults to plant in the kernels of routed experts: (file, what, what instead, test of test_moe.py that notices)."""

from __future__ import annotations

ANY = "test_rates_differ_between_experts_and_projections"
BLOCKS = "test_a_row_has_the_same_bytes_in_every_block"
PASSES = "test_passes_of_routes_and_columns"
LISTS = "test_more_items_than_a_thread_block_lists"
SLICES = "test_slices_and_shared_rotations"
PARTS = "test_parts_of_the_depth"
ONE = "test_all_rows_on_one_expert_and_rows_on_none"
ACTIVATIONS = "test_activations"
MANY = "test_many_experts"
CHUNKS = "test_routes_of_several_chunks"
SIZES = "test_blocks_of_a_window_are_listed_by_size"
SHARES = "test_shares_that_end_within_items_leave_the_same_bytes"
LARGER = "test_larger_blocks_of_sm90_have_the_same_bytes"

MOE_MUTANTS = {
    # The product for few routes.
    "few-one-copy-group-too-few": (
        "moe_few.cuh",
        "cp_async_wait<kFewStages - 2>",
        "cp_async_wait<kFewStages - 1>",
        ANY,
    ),
    "few-lanes-read-before-others-copied": (
        "moe_few.cuh",
        "    __syncwarp();\n    if (loader.left > 0) {",
        "    if (loader.left > 0) {",
        ANY,
    ),
    "few-inputs-of-the-first-half": ("moe_few.cuh", "(chunk + 1) % kChunks * kFewChunk", "0", ANY),
    "few-inputs-of-the-next-item-shifted": (
        "moe_few.cuh",
        "source.seek(stage, next);\n",
        "source.seek(stage, next), source.from += 16;\n",
        LISTS,
    ),
    "few-inputs-read-before-they-are-there": (
        "moe_few.cuh",
        "  wait_for_previous_grid();  // for its inputs; the weights are on their way\n  allow_next_grid();\n",
        "",
        ANY,
    ),
    "few-next-grid-allowed-too-early": (
        "moe_few.cuh",
        "  wait_for_previous_grid();  // for its inputs; the weights are on their way\n  allow_next_grid();\n",
        "  allow_next_grid();\n  wait_for_previous_grid();\n",
        ANY,
    ),
    "few-column-of-the-first": ("moe_few.cuh", "++column, to += kTile", "++column", ANY),
    "few-noise-in-the-middle": (
        "moe_few_ends.cuh",
        "of_all >= args.intermediate",
        "of_all > args.intermediate",
        SLICES,
    ),
    "few-slots-skipped": ("moe_few_ends.cuh", "first += kFewSlots", "first += 2 * kFewSlots", MANY),
    "few-slot-of-another-warp": ("moe_few_ends.cuh", "y += terms[i][threadIdx.x]", "y += terms[0][threadIdx.x]", ANY),
    "few-list-skipped": ("moe_few.cuh", "first += kFewListed", "first += 2 * kFewListed", LISTS),
    "few-copies-of-another-rate": ("moe_few.cuh", "if (loader.rate2 == kRate2)", "if (true)", LISTS),
    # The product for many.
    "moe-list-refilled-with-later-items": (
        "moe_product.cuh",
        "(number / kHalf + 1) * kHalf",
        "(number / kHalf + 2) * kHalf",
        LISTS,
    ),
    "moe-stage-read-before-all-copied": (
        "moe_product.cuh",
        "    __syncthreads();\n    if (loader.left > 0) {",
        "    if (loader.left > 0) {",
        BLOCKS,
    ),
    "moe-chunks-not-swapped": ("moe_product.cuh", "(chunk ^ row % 8) * 16", "chunk * 16", BLOCKS),
    "moe-half-of-the-rows": (
        "moe_product.cuh",
        "rows <= kLess * kGroupRows",
        "rows <= kGroups * kGroupRows",
        BLOCKS,
    ),
    "moe-next-inputs-one-chunk-off": (
        "moe_product.cuh",
        "at % kTilesOfSegment * kTile * 2",
        "at % kTilesOfSegment * kTile",
        BLOCKS,
    ),
    "moe-rows-beyond-the-block-stored": ("moe_shares.cuh", "return rows > row;", "return rows >= row;", BLOCKS),
    # Items, routes and arena.
    "moe-rows-of-the-first-window": (
        "moe_plan.cuh",
        "stage.before = window * args.window;",
        "stage.before = 0;",
        PASSES,
    ),
    "moe-part-of-another": ("moe_items.cuh", "first * kUnitDepth * 2", "kUnitDepth * 2", PARTS),
    "moe-inverse-too-small": (
        "moe_items.cuh",
        "((1ull << 32) + divisor - 1) / divisor",
        "(1ull << 32) / divisor",
        SLICES,
    ),
    "moe-windows-do-not-cut": (
        "moe_route.cuh",
        "min(min(from + args.row_tile, end), window_end)",
        "min(min(from + args.row_tile, end), window_end + args.window)",
        PASSES,
    ),
    "moe-one-tile-for-two": (
        "moe_product.cuh",
        "else warpgroup_mma(sums, a[tile], x(tile));",
        "else warpgroup_mma(sums, a[tile], x(0));",
        LARGER,
    ),
    "moe-weights-of-the-first-of-two-columns": (
        "moe_product.cuh",
        "warp % S::kColumnBlocks * kBlockTiles * 16 * rate2",
        "warp % S::kColumnBlocks * kBlockTiles * 8 * rate2",
        LARGER,
    ),
    "moe-columns-one-by-one": (
        "moe_items.cuh",
        "column * stage.item_columns) * kBlockColumns",
        "column) * kBlockColumns",
        LARGER,
    ),
    "moe-tall-one-box-for-all-rows": ("moe_tall.cuh", "item.source + box * Tall::kBoxRows", "item.source", LARGER),
    "moe-tall-one-row-of-tiles": ("moe_tall.cuh", "item.weights + lane * pitch", "item.weights", LARGER),
    "moe-tall-stages-of-one-warp": (
        "moe_tall.cuh",
        "k += Tall::kDepth * Tall::kFetchWarps;",
        "k += Tall::kDepth;",
        LARGER,
    ),
    "moe-tall-item-from-the-start-of-a-turn": ("moe_tall.cuh", "at -= stages;", "at = warp;", LARGER),
    "moe-tall-item-not-waited-for": (
        "moe_tall.cuh",
        "      barrier_wait(ring.item(next_item - 1), (next_item - 1) / Tall::kListed % 2);\n",
        "",
        LARGER,
    ),
    "moe-tall-rows-rounded-down": (
        "moe_tall.cuh",
        "if (item.rows <= kLess * kGroupRows)",
        "if (item.rows <= kLess * kGroupRows + 2)",
        LARGER,
    ),
    "moe-tall-rows-beyond-the-block-stored": (
        "moe_tall.cuh",
        "store_32_if_more(place.rows, row + 1,",
        "store_32_if_more(place.rows, row,",
        SHARES,
    ),
    "moe-tall-groups-left-out": (
        "moe_tall.cuh",
        "group % 2 == 0 && row >= rows",
        "group % 2 == 0 && row + 16 >= rows",
        LARGER,
    ),
    "moe-tall-sums-of-the-item-before": (
        "moe_tall.cuh",
        "bool add = shuffle_from(going_on, 0) != 0;",
        "bool add = true;",
        LARGER,
    ),
    "moe-tall-stage-read-before-it-is-full": (
        "moe_tall.cuh",
        "barrier_expect(full, boxes * Tall::kBoxBytes + Tall::kTileRows * bytes)",
        "barrier_expect(full, boxes * Tall::kBoxBytes)",
        LARGER,
    ),
    "moe-share-waits-for-its-own-sums": (
        "moe_shares.cuh",
        "share_flag(call, stage, number - 1)",
        "share_flag(call, stage, number)",
        SHARES,
    ),
    "moe-share-takes-the-sums-of-another": (
        "moe_shares.cuh",
        "second_columns<kGroups>(call, number - 1,",
        "second_columns<kGroups>(call, number,",
        SHARES,
    ),
    "moe-share-begins-a-stage-early": (
        "moe_shares.cuh",
        "return {from.place, from.stage, depth",
        "return {from.place, from.stage - 1, depth",
        SHARES,
    ),
    "moe-tail-share-of-all-before": ("moe_tail.cuh", "border(tail.block, before)", "border(tail.block, 0)", SHARES),
    "moe-tail-pieces-from-the-first-item": (
        "moe_tail.cuh",
        "stage.depth, number - tail.rounds)",
        "stage.depth, number)",
        SHARES,
    ),
    "moe-tail-shares-of-one-round-more": (
        "moe_tail.cuh",
        "begin = tail.rounds * grid;",
        "begin = (tail.rounds + 1) * grid;",
        SHARES,
    ),
    "moe-tall-waits-for-its-own-sums": (
        "moe_tall.cuh",
        "wait_for_flag(share_flag(call, stage, block - 1))",
        "wait_for_flag(share_flag(call, stage, block))",
        SHARES,
    ),
    "moe-tall-takes-the-sums-of-another": (
        "moe_tall.cuh",
        "second_columns<Tall::kGroups>(call, block - 1,",
        "second_columns<Tall::kGroups>(call, block,",
        SHARES,
    ),
    "moe-tall-forgets-what-it-took": (
        "moe_tall.cuh",
        "bool add = shuffle_from(going_on, 0) != 0;",
        "bool add = false;",
        SHARES,
    ),
    "moe-tall-stores-what-it-should-leave": ("moe_tall.cuh", "if (stage.cut && item.gives)", "if (false)", SHARES),
    "moe-smallest-blocks-first": ("moe_route.cuh", "(args.row_tile - (to - from))", "(to - from - 1)", SIZES),
    "moe-sizes-of-one-window": ("moe_route.cuh", "next + from / args.window * kBlockSizes", "next", PASSES),
    "moe-end-of-the-last-window": (
        "moe_route.cuh",
        "if (thread % kBlockSizes",
        "if (thread < kCounters && thread % kBlockSizes",
        SIZES,
    ),
    "moe-round-back-off-by-one": ("moe_items.cuh", "blocks - 1 - block :", "blocks - block :", LISTS),
    "moe-id-beyond-the-last": ("moe_route.cuh", "id < args.experts", "id <= args.experts", ONE),
    "moe-nobody-is-expert-0": ("moe_route.cuh", "static_cast<int>(id) : -1", "static_cast<int>(id) : 0", ONE),
    "moe-arena-one-block-short": (
        "moe_layout.cuh",
        "most_blocks * static_cast",
        "(most_blocks - 1) * 0 * static_cast",
        BLOCKS,
    ),
    # Transforms, activation and sum.
    "moe-chunks-before-forgotten": ("moe_route.cuh", "some += other < chunk", "some += other <= chunk", CHUNKS),
    "moe-outer-transform-one-bit-short": ("moe_transform.cuh", "span < 2 * kPieces", "span < kPieces", BLOCKS),
    "moe-many-signs-of-no-expert": (
        "moe_rotate.cuh",
        "args.shared_h ? 0 : block.expert",
        "args.shared_h ? block.expert : 0",
        ANY,
    ),
    "moe-signs-of-no-expert": ("moe_values.cuh", "args.shared_h ? 0 : expert", "args.shared_h ? expert : 0", ANY),
    "moe-input-not-weighted": (
        "moe_values.cuh",
        "args.weight_on_input ? args.weights[route] : 1.0f",
        "1.0f",
        SLICES,
    ),
    "moe-many-sixteens-of-the-first": ("moe_rotate.cuh", "block.start + sixteen * kSixteen", "block.start", BLOCKS),
    "moe-many-sixteens-of-the-size-before": ("moe_rotate.cuh", "end <= sixteen", "end < sixteen", LARGER),
    "moe-many-sixteens-of-one-size": (
        "moe_rotate.cuh",
        "if (lane >= span) end += before;",
        "end += 0 * before;",
        LARGER,
    ),
    "moe-many-first-group-of-the-last-runs": ("moe_rotate.cuh", "(at - whole) % kInputGroups);", "0);", BLOCKS),
    "moe-many-runs-left-out": ("moe_rotate.cuh", "(all - whole) * kInputGroups; at", "(all - whole); at", BLOCKS),
    "moe-many-signs-of-gate-for-up": (
        "moe_rotate.cuh",
        "!kFewRegisters && matrix == 0) next = Signs(suh + args.k);",
        "matrix == 0) next = Signs(suh);",
        ANY,
    ),
    "moe-factors-of-half-a-tile": ("moe_combine.cuh", "four[0] = second ? taken : kept", "four[0] = kept", ANY),
    "moe-slots-of-the-first-lanes": ("moe_combine.cuh", "if (slot % 32 == 0)", "if (slot == 0)", MANY),
    "moe-noise-in-the-middle": ("moe_combine.cuh", "8 * i < args.intermediate", "8 * i <= args.intermediate", SLICES),
    "moe-part-dropped": (
        "moe_few_ends.cuh",
        "int part = 0; part < args.parts",
        "int part = 1; part < args.parts",
        PARTS,
    ),
    "moe-gate-not-limited": ("moe_values.cuh", "gate = fminf(gate, args.limit);", "", ACTIVATIONS),
    "moe-sums-not-scaled-back": ("moe_combine.cuh", "kHadamardScale / call.down_scale", "kHadamardScale", BLOCKS),
}
