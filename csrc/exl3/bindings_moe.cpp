// The operators of routed experts, on the LibTorch stable ABI: checks, then the launcher of moe.h.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "bindings.h"
#include "moe.h"

namespace {

using namespace exl3;
using torch::stable::accelerator::DeviceGuard;

constexpr int kSizes = 11, kPlanned = 7, kSliceTensors = 6;

// Numbers of a layer and of its plan, in the order of ops_moe.py.
MoeArgs numbers(int64_t m, int64_t slices, const std::vector<int64_t>& sizes, const std::vector<int64_t>& plan) {
  STD_TORCH_CHECK(sizes.size() == kSizes && plan.size() == kPlanned, "exl3: ", sizes.size(), " sizes and ", plan.size(),
                  " numbers of a plan, want ", kSizes, " and ", kPlanned);
  STD_TORCH_CHECK(slices >= 1 && slices <= kMaxSlices, "exl3: ", slices, " slices, want 1 to ", kMaxSlices);
  MoeArgs args{};
  args.m = static_cast<int>(m);
  args.slices = static_cast<int>(slices);
  int* const of_sizes[] = {&args.k, &args.hidden, &args.width, &args.intermediate, &args.experts, &args.top_k,
                           &args.codebook, &args.max_rate2};
  for (size_t i = 0; i < std::size(of_sizes); ++i) *of_sizes[i] = static_cast<int>(sizes[i]);
  args.shared_h = sizes[8] != 0;
  args.weight_on_input = sizes[9] != 0;
  args.activation = static_cast<MoeActivation>(sizes[10]);
  args.decode = plan[0] != 0;
  args.pairs = plan[6] != 0;
  int* const of_plan[] = {&args.row_tile, &args.parts, &args.window, &args.down_columns, &args.grid};
  for (size_t i = 0; i < std::size(of_plan); ++i) *of_plan[i] = static_cast<int>(plan[i + 1]);

  STD_TORCH_CHECK(args.k > 0 && args.k % 128 == 0 && args.width > 0 && args.width % 128 == 0, "exl3: experts of ",
                  args.k, " x ", args.width, ", want multiples of 128");
  STD_TORCH_CHECK(args.hidden > 0 && args.hidden <= args.k, "exl3: hidden is ", args.hidden, ", want 1 to k = ", args.k);
  STD_TORCH_CHECK(args.experts >= 1 && args.experts <= kMaxExperts, "exl3: ", args.experts, " experts, want 1 to ",
                  kMaxExperts);
  STD_TORCH_CHECK(args.top_k >= 1 && m >= 0 && m * args.top_k < (1 << 24), "exl3: ", m, " rows of ", args.top_k,
                  " routes, want less than 2^24 in all");
  check_rate(args.max_rate2, args.codebook);
  STD_TORCH_CHECK(sizes[10] >= 0 && sizes[10] <= static_cast<int>(MoeActivation::kSquaredRelu), "exl3: activation ",
                  sizes[10], ", want 0 to 4");
  constexpr int kTiles[] = {16, 32, 64, kPairRowTile, kMaxRowTile};
  const bool tile = args.decode ? args.row_tile == kDecodeRows
                                : std::find(std::begin(kTiles), std::end(kTiles), args.row_tile) != std::end(kTiles);
  STD_TORCH_CHECK(tile, "exl3: blocks of ", args.row_tile, " rows, want 8 to decode, else 16, 32, 64, 128 or 256");
  STD_TORCH_CHECK(args.row_tile < kMaxRowTile || tall_blocks(args), "exl3: blocks of ", args.row_tile,
                  " rows, want SM90 (pairs) and inputs that are not shared by the experts of a row");
  STD_TORCH_CHECK(args.parts >= 1 && args.parts <= (args.decode ? args.k / 128 : 1) && args.window >= 1 && args.grid >= 1,
                  "exl3: a plan of ", args.parts, " parts, windows of ", args.window, " routes and a grid of ", args.grid);
  STD_TORCH_CHECK(m * args.top_k <= static_cast<int64_t>(args.window) * kMaxWindows, "exl3: ", m * args.top_k,
                  " routes in windows of ", args.window, ", want at most ", kMaxWindows, " windows");
  STD_TORCH_CHECK(!args.decode || args.window >= m * args.top_k, "exl3: ", m * args.top_k,
                  " routes, want at most the window of a decode plan, ", args.window);
  STD_TORCH_CHECK(!args.decode || args.down_columns >= args.k, "exl3: down in passes of ", args.down_columns,
                  " columns, want all ", args.k, " to decode");
  STD_TORCH_CHECK(args.down_columns >= 128 && args.down_columns % 128 == 0, "exl3: down in passes of ",
                  args.down_columns, " columns, want a multiple of 128");
  return args;
}

int64_t moe_arena_bytes(int64_t m, int64_t slices, std::vector<int64_t> sizes, std::vector<int64_t> plan) {
  return exl3::moe_arena_bytes(numbers(m, slices, sizes, plan));
}

// y [m, hidden] <- the experts' weighted sum; see MoeArgs. slices: six tensors each: trellis, suh and svh of gate and
// up, then of down.
void moe(Tensor y, const Tensor& x, const Tensor& weights, const Tensor& ids, Tensor arena, const Tensor& table,
         std::vector<Tensor> slices, std::vector<int64_t> sizes, std::vector<int64_t> plan, double limit, double alpha,
         double beta, bool dependent_launch) {
  check_matrix(x, "x");
  check_matrix(y, "y");
  STD_TORCH_CHECK(!slices.empty() && slices.size() % kSliceTensors == 0, "exl3: ", slices.size(),
                  " tensors of slices, want six for each");
  MoeArgs args = numbers(x.size(0), static_cast<int64_t>(slices.size()) / kSliceTensors, sizes, plan);
  const int32_t device = x.get_device_index();
  const int64_t routes = static_cast<int64_t>(args.m) * args.top_k, experts = args.shared_h ? 1 : args.experts;
  STD_TORCH_CHECK(x.size(1) == args.hidden && y.size(1) == args.hidden && y.size(0) == args.m, "exl3: x is ", x.size(0),
                  " x ", x.size(1), " and y is ", y.size(0), " x ", y.size(1), ", want both ", args.m, " x ", args.hidden);
  args.io_type = data_type(x, "x");
  STD_TORCH_CHECK(data_type(y, "y") == args.io_type, "exl3: x and y have scalar types ",
                  static_cast<int>(x.scalar_type()), " and ", static_cast<int>(y.scalar_type()), ", want the same");
  check_vector(weights, "weights", ScalarType::Float, routes, device);
  args.wide_ids = ids.scalar_type() == ScalarType::Long;
  check_vector(ids, "ids", args.wide_ids ? ScalarType::Long : ScalarType::Int, routes, device);
  check_vector(table, "table", ScalarType::Long, 3ll * args.experts, device);
  check_vector(arena, "arena", ScalarType::Byte, exl3::moe_arena_bytes(args), device);
  check_aligned(arena, "arena", 256);
  for (int i = 0; i < args.slices; ++i) {
    const Tensor* of = &slices[kSliceTensors * i];
    check_vector(of[0], "w13_trellis", ScalarType::Short, 1, device);
    check_vector(of[1], "w13_suh", ScalarType::Half, experts * kMatrices * args.k, device);
    check_vector(of[2], "w13_svh", ScalarType::Half, static_cast<int64_t>(args.experts) * kMatrices * args.width, device);
    check_vector(of[3], "w2_trellis", ScalarType::Short, 1, device);
    check_vector(of[4], "w2_suh", ScalarType::Half, static_cast<int64_t>(args.experts) * args.width, device);
    check_vector(of[5], "w2_svh", ScalarType::Half, experts * args.k, device);
    check_aligned(of[0], "w13_trellis", 16);
    check_aligned(of[3], "w2_trellis", 16);
    for (int vector : {1, 2, 4, 5}) check_aligned(of[vector], "a vector of signs", 16);
    args.slice[i] = {{static_cast<const unsigned char*>(of[0].data_ptr()), static_cast<const unsigned char*>(of[3].data_ptr())},
                     of[1].data_ptr(), of[2].data_ptr(), of[4].data_ptr(), of[5].data_ptr()};
  }
  if (args.m == 0) return;
  args.table = static_cast<const int64_t*>(table.data_ptr());
  args.x = x.data_ptr();
  args.weights = static_cast<const float*>(weights.data_ptr());
  args.ids = ids.data_ptr();
  args.y = y.data_ptr();
  args.arena = static_cast<unsigned char*>(arena.data_ptr());
  args.x_stride = x.stride(0);
  args.y_stride = y.stride(0);
  const auto wide = [&](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 && t.stride(0) % 8 == 0;
  };
  args.wide_x = wide(x) && wide(y);
  args.limit = static_cast<float>(limit);
  args.alpha = static_cast<float>(alpha);
  args.beta = static_cast<float>(beta);
  const DeviceGuard guard(device);
  check_launch(launch_moe(args, dependent_launch, current_stream(device)), "moe");
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(exl3, m) {
  m.def(
      "moe(Tensor(a!) y, Tensor x, Tensor weights, Tensor ids, Tensor(b!) arena, Tensor table, Tensor[] slices, "
      "int[] sizes, int[] plan, float limit, float alpha, float beta, bool dependent_launch) -> ()");
  m.def("moe_arena_bytes(int m, int slices, int[] sizes, int[] plan) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) { m.impl("moe", TORCH_BOX(&moe)); }

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("moe_arena_bytes", TORCH_BOX(&::moe_arena_bytes));
}
