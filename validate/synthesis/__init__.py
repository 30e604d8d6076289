# SPDX-License-Identifier: Apache-2.0
"""Synthetic EXL3 checkpoints: weights, configurations and files, exactly as the format has them."""
