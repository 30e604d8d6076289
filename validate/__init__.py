# SPDX-License-Identifier: Apache-2.0
"""Commands that a user runs against a checkpoint or a running server: `python -m validate`."""
