// A grid to launch, and whether it may begin before the one ahead of it has ended.
#pragma once

#include <cuda_runtime.h>

namespace exl3 {

struct Launch {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config;
  Launch(dim3 grid, int threads, int shared_bytes, bool dependent, cudaStream_t stream, int cluster = 1)
      : attributes(), config() {
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (dependent) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = cluster;
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
  }
};

}  // namespace exl3
