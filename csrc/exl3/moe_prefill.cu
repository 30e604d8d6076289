// Many routes an expert: exact weights, and a block as high as the routing fills.
#include "moe_launch.cuh"

namespace exl3 {

cudaError_t launch_moe_prefill(const MoeCall& call, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  switch (call.args.row_tile) {
    case 16: return launch_moe_book<MoeShape<16, 4>>(call, stage, dependent, stream);
    case 32: return launch_moe_book<MoeShape<32, 4>>(call, stage, dependent, stream);
    case 64: return launch_moe_book<MoeShape<64, 3>>(call, stage, dependent, stream);
    case 128: return launch_moe_book<MoeShape<128, 2>>(call, stage, dependent, stream);
    case 256: return launch_moe_book<MoeShape<256, 2>>(call, stage, dependent, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace exl3
