// A grid to launch, and whether it may begin before the one ahead of it has ended.
#pragma once

#include <cuda_runtime.h>

namespace exl3 {

struct Launch {
  cudaLaunchAttribute attribute;
  cudaLaunchConfig_t config;
  Launch(dim3 grid, int threads, int shared_bytes, bool dependent, cudaStream_t stream) : attribute(), config() {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = dependent ? 1 : 0;
  }
};

}  // namespace exl3
