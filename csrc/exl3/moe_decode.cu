// Few routes an expert, where decoding binds: 8 rows a block, and no rounding of weights where it costs instructions.
#include "moe_launch.cuh"

namespace exl3 {

cudaError_t launch_moe_decode(const MoeArgs& args, const MoeStage& stage, bool dependent, cudaStream_t stream) {
  using Twice = MoeShape<kDecodeRows, 4, true, float>;
  using Once = MoeShape<kDecodeRows, 4, false, float>;
  switch (static_cast<Codebook>(args.codebook)) {
    case Codebook::k3inst: return launch_moe_shape<Codebook::k3inst, Twice>(args, stage, dependent, stream);
    case Codebook::kMcg: return launch_moe_shape<Codebook::kMcg, Twice>(args, stage, dependent, stream);
    case Codebook::kMul1: return launch_moe_shape<Codebook::kMul1, Once>(args, stage, dependent, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace exl3
