// The operators of namespace `exl3`, on the LibTorch stable ABI: one binary for several torch versions.
// Checks shapes, devices and types once, then calls the launchers of exl3.h on torch's current stream.
#include <string>
#include <vector>

#include "bindings.h"

namespace {

using exl3::check_aligned;
using exl3::check_launch;
using exl3::check_matrix;
using exl3::check_rate;
using exl3::check_vector;
using exl3::current_stream;
using exl3::data_type;
using exl3::ScalarType;
using exl3::Tensor;
using torch::stable::accelerator::DeviceGuard;

constexpr int kShardInts = 4;  // n, first, width, 2K

// All of a product's arguments but the scratch. trellis, suh and svh hold the shards end to end. shards: four integers
// each, n, first, width and 2K.
exl3::LinearArgs linear_args(const Tensor& y, const Tensor& x, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
                             int64_t k, const std::vector<int64_t>& shards, int64_t codebook) {
  check_matrix(x, "x");
  check_matrix(y, "y");
  const int32_t device = x.get_device_index();
  const int64_t count = static_cast<int64_t>(shards.size()) / kShardInts;
  STD_TORCH_CHECK(k > 0 && k % 128 == 0, "exl3: k is ", k, ", want a multiple of 128");
  STD_TORCH_CHECK(x.size(1) <= k, "exl3: x has ", x.size(1), " columns, want at most k = ", k);
  STD_TORCH_CHECK(count >= 1 && count <= exl3::kMaxShards && shards.size() % kShardInts == 0, "exl3: ", shards.size(),
                  " shard integers, want 4 for each of 1 to ", exl3::kMaxShards, " shards");

  exl3::LinearArgs args{};
  int64_t words = 0, columns = 0, out = 0;
  const auto* trellis_bytes = static_cast<const unsigned char*>(trellis.data_ptr());
  const auto* suh_halves = static_cast<const uint16_t*>(suh.data_ptr());
  const auto* svh_halves = static_cast<const uint16_t*>(svh.data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = shards[kShardInts * i], first = shards[kShardInts * i + 1];
    const int64_t width = shards[kShardInts * i + 2], rate2 = shards[kShardInts * i + 3];
    check_rate(rate2, codebook);
    STD_TORCH_CHECK(n > 0 && n % 128 == 0, "exl3: shard ", i, " has n = ", n, ", want a multiple of 128");
    STD_TORCH_CHECK(first >= 0 && width > 0 && first + width <= n, "exl3: shard ", i, " takes columns ", first, " to ",
                    first + width, " of ", n);
    args.shard[i] = {trellis_bytes + 2 * words,
                     suh_halves + k * i,
                     svh_halves + columns,
                     static_cast<int>(columns / 128),
                     static_cast<int>(n / 128),
                     static_cast<int>(first),
                     static_cast<int>(width),
                     static_cast<int>(out),
                     static_cast<int>(rate2)};
    words += k * n / 256 * 8 * rate2;
    columns += n;
    out += width;
  }
  STD_TORCH_CHECK(y.size(0) == x.size(0) && y.size(1) == out, "exl3: y is ", y.size(0), " x ", y.size(1), ", want ",
                  x.size(0), " x ", out);
  check_vector(trellis, "trellis", ScalarType::Short, words, device);
  check_vector(suh, "suh", ScalarType::Half, k * count, device);
  check_vector(svh, "svh", ScalarType::Half, columns, device);
  check_aligned(trellis, "trellis", 16);
  check_aligned(suh, "suh", 8);
  check_aligned(svh, "svh", 8);
  STD_TORCH_CHECK(columns / 128 * (k / 128) < (1 << 24), "exl3: ", k, " x ", columns, " is too large a product");

  args.x = x.data_ptr();
  args.y = y.data_ptr();
  args.x_stride = x.stride(0);
  args.y_stride = y.stride(0);
  args.shards = static_cast<int>(count);
  args.m = static_cast<int>(x.size(0));
  args.k = static_cast<int>(k);
  args.k_true = static_cast<int>(x.size(1));
  args.x_type = data_type(x, "x");
  args.y_type = data_type(y, "y");
  return args;
}

void give_scratch(exl3::LinearArgs& args, const Tensor& scratch, int64_t need, int32_t device) {
  check_vector(scratch, "scratch", ScalarType::Byte, need, device);
  check_aligned(scratch, "scratch", 256);
  args.scratch = static_cast<unsigned char*>(scratch.data_ptr());
}

int column_blocks(const exl3::LinearArgs& args) {
  return args.shard[args.shards - 1].first_block + args.shard[args.shards - 1].blocks;
}

// y [m, sum of widths] <- every shard of a merged projection; see linear_args.
void linear(Tensor y, const Tensor& x, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
            Tensor scratch, int64_t k, std::vector<int64_t> shards, int64_t codebook,
            int64_t splits, bool dependent_launch) {
  exl3::LinearArgs args = linear_args(y, x, trellis, suh, svh, k, shards, codebook);
  STD_TORCH_CHECK(splits > 0, "exl3: splits is ", splits, ", want at least 1");
  args.splits = static_cast<int>(splits);
  if (args.m == 0) return;
  const int32_t device = x.get_device_index();
  give_scratch(args, scratch, exl3::linear_scratch_bytes(args.m, args.k, column_blocks(args), args.shards, args.splits),
               device);
  const DeviceGuard guard(device);
  check_launch(exl3::launch_linear(args, static_cast<int>(codebook), dependent_launch, current_stream(device)), "linear");
}

// The same for many rows, on SM90 alone. blocks: of the grid, one a multiprocessor.
void linear_many_rows(Tensor y, const Tensor& x, const Tensor& trellis, const Tensor& suh, const Tensor& svh,
                      Tensor scratch, int64_t k, std::vector<int64_t> shards, int64_t codebook, int64_t blocks) {
  exl3::LinearArgs args = linear_args(y, x, trellis, suh, svh, k, shards, codebook);
  STD_TORCH_CHECK(blocks > 0, "exl3: blocks is ", blocks, ", want at least 1");
  args.splits = static_cast<int>(blocks);
  if (args.m == 0) return;
  const int32_t device = x.get_device_index();
  STD_TORCH_CHECK(column_blocks(args) * (k / 128) * ((args.m + 255) / 256) < (1ll << 31), "exl3: ", args.m, " x ", k, " x ",
                  128 * column_blocks(args), " is too large a product");
  give_scratch(args, scratch, exl3::many_rows_scratch_bytes(args.m, args.k, args.shards, args.splits), device);
  const DeviceGuard guard(device);
  check_launch(exl3::launch_many_rows(args, static_cast<int>(codebook), true, current_stream(device)), "linear_many_rows");
}

// w [k, n] <- decoded trellis [k/16, n/16, 8 * rate2], rotated basis.
void reconstruct(Tensor w, const Tensor& trellis, int64_t rate2, int64_t codebook) {
  check_matrix(w, "w");
  check_rate(rate2, codebook);
  const int64_t k = w.size(0), n = w.size(1);
  STD_TORCH_CHECK(k % 16 == 0 && n % 128 == 0 && w.is_contiguous(), "exl3: w is ", k, " x ", n,
                  ", want contiguous multiples of 16 and 128");
  check_vector(trellis, "trellis", ScalarType::Short, k * n / 256 * 8 * rate2, w.get_device_index());
  const DeviceGuard guard(w.get_device_index());
  check_launch(exl3::launch_reconstruct(trellis.data_ptr(), static_cast<int>(k), static_cast<int>(n),
                                        static_cast<int>(rate2), static_cast<int>(codebook), w.data_ptr(),
                                        data_type(w, "w"), current_stream(w.get_device_index())),
               "reconstruct");
}

// w [k_true, columns] <- columns 128 * first_block and up of the original matrix; trellis [k/16, n/16, 8 * rate2].
void reconstruct_original(Tensor w, const Tensor& trellis, const Tensor& suh, const Tensor& svh, int64_t n,
                          int64_t first_block, int64_t rate2, int64_t codebook) {
  check_matrix(w, "w");
  check_rate(rate2, codebook);
  const int32_t device = w.get_device_index();
  const int64_t k = (w.size(0) + 127) / 128 * 128, columns = w.size(1);
  STD_TORCH_CHECK(n % 128 == 0 && first_block >= 0 && 128 * first_block + columns <= n, "exl3: w takes columns ",
                  128 * first_block, " to ", 128 * first_block + columns, " of ", n);
  check_vector(trellis, "trellis", ScalarType::Short, k * n / 256 * 8 * rate2, device);
  check_vector(suh, "suh", ScalarType::Half, k, device);
  check_vector(svh, "svh", ScalarType::Half, n, device);
  check_aligned(trellis, "trellis", 16);
  check_aligned(suh, "suh", 16);
  check_aligned(svh, "svh", 16);
  const DeviceGuard guard(device);
  check_launch(exl3::launch_reconstruct_original(
                   trellis.data_ptr(), suh.data_ptr(), svh.data_ptr(), static_cast<int>(n),
                   static_cast<int>(w.size(0)), static_cast<int>(first_block), static_cast<int>(columns),
                   static_cast<int>(rate2), static_cast<int>(codebook), w.data_ptr(), w.stride(0), data_type(w, "w"),
                   current_stream(device)),
               "reconstruct_original");
}

// y [m, n_out] <- had(x [m, n_in] * pre) * post over n columns, x zero-extended and y cut.
void hadamard(Tensor y, const Tensor& x, const std::optional<Tensor>& pre, const std::optional<Tensor>& post, int64_t n) {
  check_matrix(x, "x");
  check_matrix(y, "y");
  const int32_t device = x.get_device_index();
  STD_TORCH_CHECK(n % 128 == 0 && x.size(1) <= n && y.size(1) <= n && x.size(0) == y.size(0), "exl3: hadamard of ",
                  x.size(0), " x ", x.size(1), " to ", y.size(0), " x ", y.size(1), " over ", n);
  if (pre) check_vector(*pre, "pre", ScalarType::Half, n, device);
  if (post) check_vector(*post, "post", ScalarType::Half, n, device);
  if (x.size(0) == 0) return;
  const DeviceGuard guard(device);
  check_launch(exl3::launch_hadamard(x.data_ptr(), x.stride(0), static_cast<int>(x.size(1)),
                                     pre ? pre->data_ptr() : nullptr, post ? post->data_ptr() : nullptr, y.data_ptr(),
                                     y.stride(0), static_cast<int>(y.size(1)), static_cast<int>(x.size(0)),
                                     static_cast<int>(n), data_type(x, "x"), data_type(y, "y"), current_stream(device)),
               "hadamard");
}

int64_t linear_scratch_bytes(int64_t m, int64_t k, int64_t blocks, int64_t shards, int64_t splits) {
  return static_cast<int64_t>(exl3::linear_scratch_bytes(static_cast<int>(m), static_cast<int>(k),
                                                         static_cast<int>(blocks), static_cast<int>(shards),
                                                         static_cast<int>(splits)));
}

int64_t many_rows_scratch_bytes(int64_t m, int64_t k, int64_t shards, int64_t blocks) {
  return static_cast<int64_t>(exl3::many_rows_scratch_bytes(static_cast<int>(m), static_cast<int>(k),
                                                            static_cast<int>(shards), static_cast<int>(blocks)));
}

}  // namespace

STABLE_TORCH_LIBRARY(exl3, m) {
  m.def(
      "linear(Tensor(a!) y, Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor(b!) scratch, int k, "
      "int[] shards, int codebook, int splits, bool dependent_launch) -> ()");
  m.def(
      "linear_many_rows(Tensor(a!) y, Tensor x, Tensor trellis, Tensor suh, Tensor svh, Tensor(b!) scratch, int k, "
      "int[] shards, int codebook, int blocks) -> ()");
  m.def("reconstruct(Tensor(a!) w, Tensor trellis, int rate2, int codebook) -> ()");
  m.def(
      "reconstruct_original(Tensor(a!) w, Tensor trellis, Tensor suh, Tensor svh, int n, int first_block, int rate2, "
      "int codebook) -> ()");
  m.def("hadamard(Tensor(a!) y, Tensor x, Tensor? pre, Tensor? post, int n) -> ()");
  m.def("linear_scratch_bytes(int m, int k, int blocks, int shards, int splits) -> int");
  m.def("many_rows_scratch_bytes(int m, int k, int shards, int blocks) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_many_rows", TORCH_BOX(&linear_many_rows));
  m.impl("reconstruct", TORCH_BOX(&reconstruct));
  m.impl("reconstruct_original", TORCH_BOX(&reconstruct_original));
  m.impl("hadamard", TORCH_BOX(&hadamard));
}

STABLE_TORCH_LIBRARY_IMPL(exl3, CompositeExplicitAutograd, m) {
  m.impl("linear_scratch_bytes", TORCH_BOX(&linear_scratch_bytes));
  m.impl("many_rows_scratch_bytes", TORCH_BOX(&many_rows_scratch_bytes));
}
