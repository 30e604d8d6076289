# SPDX-License-Identifier: Apache-2.0
"""EXL3 (ExLlamaV3 trellis) weights. Importing this package imports nothing: not torch, not vLLM."""
