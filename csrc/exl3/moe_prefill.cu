// Many routes an expert: exact weights, a block as high as the routing fills, and on SM90 two column blocks at once.
#include "moe_launch.cuh"

namespace exl3 {

cudaError_t launch_moe_prefill(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  const bool pairs = call.args.pairs && stage.columns % 2 == 0 &&
                     call.args.max_rate2 <= max_pair_rate2(static_cast<Codebook>(call.args.codebook));
  switch (call.args.row_tile) {
    case 16: return launch_moe_book<MoeShape<16, 4>>(call, stage, dependent, stream);
    case 32: return launch_moe_book<MoeShape<32, 4>>(call, stage, dependent, stream);
    case 64:
      return pairs ? launch_moe_book<MoeShape<64, 3, 2>>(call, stage, dependent, stream)
                   : launch_moe_book<MoeShape<64, 3>>(call, stage, dependent, stream);
    case 128:
      return pairs ? launch_moe_book<MoeShape<128, 2, 2>>(call, stage, dependent, stream)
                   : launch_moe_book<MoeShape<128, 2>>(call, stage, dependent, stream);
    case kMaxRowTile: return launch_moe_tall(call, stage, dependent, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace exl3
