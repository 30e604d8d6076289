// Mid rows: 17 and more, where decoding and the tensor cores share the time.
#include "launch.cuh"

namespace exl3 {

cudaError_t launch_mid_rows(const LinearArgs& args, int rows, int codebook, bool dependent, cudaStream_t stream) {
  switch (rows) {
    case 32: return launch_book<Rows32>(args, codebook, dependent, stream);
    case 64: return launch_book<Rows64>(args, codebook, dependent, stream);
    default: return launch_book<Rows128>(args, codebook, dependent, stream);
  }
}

}  // namespace exl3
