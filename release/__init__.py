# SPDX-License-Identifier: Apache-2.0
"""Builds, locks and checks the fork: a pinned upstream wheel, a series of patches and an overlay of new files."""
